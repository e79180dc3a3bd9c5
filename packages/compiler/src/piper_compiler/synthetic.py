"""Make programs with given durations, for schedules without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from piper_ir.ground.errors import CompileError
from piper_ir.ground.sizes import TensorSpec
from piper_ir.program.program import (
    BatchTensor,
    Chunk,
    Cost,
    Input,
    Output,
    Param,
    Program,
    Signature,
    Step,
)

PhaseSeconds = float | Sequence[float]
MOST_SECONDS = 1e12
"""The largest number of seconds that is accepted: sums of larger numbers lose small terms."""
_EMPTY = TensorSpec((0,), "uint8")


def synthetic(
    *,
    stages: int,
    F: PhaseSeconds,
    I: PhaseSeconds,  # noqa: E741 - the field's name for the input gradient
    W: PhaseSeconds,
    R: PhaseSeconds | None = None,
    overlap: PhaseSeconds | None = None,
    activation: int | Sequence[int] = 1,
    kept_after_I: int | Sequence[int] | None = None,
    params: int | Sequence[int] = 0,
    hop: float = 0.0,
) -> Program:
    """Return a chain of `stages` chunks, already tagged stage=0..stages-1, one row per microbatch.

    Each argument is a number, or one number per stage. Boundary values and seeds have 0 bytes; Update and reductions
    take no time. Raises CompileError for lengths or signs that do not fit.

    Args:
        stages: how many chunks.
        F: seconds of a forward.
        I: seconds of an input gradient. B takes I + W.
        W: seconds of a weight gradient.
        R: seconds of the recomputation of F's saved tensors from its input. With them stages may be under
            `recompute(..., keep="inputs")`.
        overlap: seconds of an overlapped forward-and-backward pair.
        activation: bytes that a chunk keeps for one microbatch from the start of F to the end of B.
        kept_after_I: bytes of these (default: all) that live on from I to W once backward is split.
        params: bytes of parameters. W adds to their gradients; no step reads them, so that there is no all-gather if
            ranks shard them.
        hop: seconds of latency between devices; it occupies no stream.
    """
    if stages < 1:
        raise CompileError(f"synthetic(stages={stages}): at least one stage is needed")
    f, i, w = (_per_stage(name, value, stages) for name, value in (("F", F), ("I", I), ("W", W)))
    pairs = tuple(_per_stage("overlap", overlap, stages)) if overlap is not None else ()
    again = None if R is None else _per_stage("R", R, stages)
    _check_seconds(F=f, I=i, W=w, R=again or (), overlap=pairs, hop=(hop,))
    keep = [int(x) for x in _per_stage("activation", activation, stages)]
    after = (
        keep
        if kept_after_I is None
        else [int(x) for x in _per_stage("kept_after_I", kept_after_I, stages)]
    )
    sizes = [int(x) for x in _per_stage("params", params, stages)]
    if any(a > k for a, k in zip(after, keep, strict=True)):
        raise CompileError(
            "synthetic: kept_after_I is larger than activation; W cannot need more than F saved"
        )
    chunks = tuple(
        _chunk(s, stages, (f[s], i[s], w[s]), keep[s], after[s], sizes[s]) for s in range(stages)
    )
    manifest = tuple(
        Param(f"stage{s}.weight", TensorSpec((n,), "uint8")) for s, n in enumerate(sizes) if n
    )
    batch = (BatchTensor("inputs", _EMPTY),)
    variants = (
        ()
        if again is None
        else tuple(_recomputed(c, r) for c, r in zip(chunks, again, strict=True))
    )
    return Program(
        chunks,
        manifest,
        batch=batch,
        source="synthetic",
        hop=float(hop),
        overlap=pairs,
        variants=variants,
    )


def _check_seconds(**given: Sequence[float]) -> None:
    """Raise CompileError for durations that are no numbers, or whose sums could not be told apart."""
    for name, values in given.items():
        if not all(0 <= v <= MOST_SECONDS for v in values):
            bad = next(v for v in values if not 0 <= v <= MOST_SECONDS)
            raise CompileError(
                f"synthetic({name}={bad}): seconds are a finite number that is not negative, and at most "
                f"{MOST_SECONDS:g}"
            )


def _per_stage(name: str, value: PhaseSeconds | Sequence[int], stages: int) -> list[float]:
    listed: Sequence[float] = value if isinstance(value, Sequence) else [value] * stages
    if not all(isinstance(v, int | float) for v in listed):
        raise CompileError(
            f"synthetic({name}={value!r}): a number is needed, or a list with one per stage"
        )
    try:
        values = [float(v) for v in listed]
    except OverflowError:  # an integer of hundreds of digits
        raise CompileError(
            f"synthetic({name}=...): seconds and bytes are finite numbers that are not negative"
        ) from None
    if len(values) != stages:
        raise CompileError(
            f"synthetic({name}=...): {len(values)} values for {stages} stages; give one number, or one per stage"
        )
    if not all(0 <= v < float("inf") for v in values):
        raise CompileError(
            f"synthetic({name}={value}): seconds and bytes are finite numbers that are not negative"
        )
    return values


def _chunk(
    s: int, stages: int, times: tuple[float, float, float], keep: int, after: int, params: int
) -> Chunk:
    """Return the chunk of a stage.

    saved1 holds the saved tensors that W needs, saved0 the rest. I reads both, so that without a split all of them live
    to the end of B.
    """
    first, last = s == 0, s == stages - 1
    source = (
        Input("batch", "inputs", _EMPTY)
        if first
        else Input("value", f"stage{s - 1}:out0", _EMPTY, needs_grad=True)
    )
    inputs = (
        source,
        *(
            (Input("param", f"stage{s}.weight", TensorSpec((params,), "uint8"), True),)
            if params
            else ()
        ),
    )
    ports = {
        "in0": _EMPTY,
        "out0": _EMPTY,
        "tan0": _EMPTY,
        "saved0": TensorSpec((keep - after,), "uint8"),
    }
    ports |= {"saved1": TensorSpec((after,), "uint8"), "iw0": _EMPTY} | (
        {} if first else {"gin0": _EMPTY}
    )
    writes = ("iw0",) if first else ("gin0", "iw0")
    steps: dict[Step, Signature] = {
        "F": Signature(("in0",), ("out0", "saved0", "saved1"), cost=Cost(seconds=times[0])),
        "I": Signature(("saved0", "saved1", "tan0"), writes, cost=Cost(seconds=times[1])),
        "W": Signature(("saved1", "iw0"), (), (1,) if params else (), cost=Cost(seconds=times[2])),
    }
    output = Output("loss" if last else "value", _EMPTY, needs_grad=True)
    return Chunk(f"stage{s}", {"stage": s}, inputs, (output,), ports, steps)


def _recomputed(chunk: Chunk, seconds: float) -> Chunk:
    """Return the variant of a chunk whose F keeps its input alone, so that R makes the rest again."""
    forward = chunk.steps["F"]
    kept = tuple(port for port in forward.writes if port.startswith("saved"))
    steps: dict[Step, Signature] = {
        "F": replace(forward, writes=tuple(port for port in forward.writes if port not in kept)),
        "R": Signature(forward.reads, kept, cost=Cost(seconds=seconds)),
    }
    return replace(
        chunk, steps={**steps, "I": chunk.steps["I"], "W": chunk.steps["W"]}, keep="inputs"
    )
