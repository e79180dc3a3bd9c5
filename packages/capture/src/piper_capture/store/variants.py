"""Make the variants of a captured program: its chunks under policies of recomputation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import fx

from piper_capture.module.tags import examples, matches
from piper_capture.store.assemble import TRACE_ROWS
from piper_capture.store.captured import Captured
from piper_capture.store.refitted import traced_at
from piper_capture.store.sizes import Fitter, NotAffine, explain
from piper_ir.ground.errors import CaptureError, SelectorError
from piper_ir.ground.select import EMPTY
from piper_ir.program.ops import BESIDE, KEEP_ALL, WITHIN
from piper_ir.program.program import Chunk


def with_policies(captured: Captured, policies: Iterable[str], rows: int | None = None) -> Captured:
    """Return a capture whose program has variants of all chunks under these policies.

    Each code is traced once for each policy; variants that are known already are taken from the capture. Equal policies
    give the same program. With `rows`, sizes of new variants need to hold at that number of rows alone. Raises
    CaptureError if a chunk is not affine in the rows under a policy, and SelectorError for the modules of a policy that
    do not exist.
    """
    wanted = tuple(sorted({*policies} - {KEEP_ALL}))
    if not wanted:
        return captured
    key = wanted, rows or 0
    extended = captured.under.get(key) or captured.under.get((wanted, 0))
    if extended is None:
        variants = tuple(v for keep in wanted for v in _variants(captured, keep, rows))
        extended = captured.under[key] = replace(captured.program, variants=variants)
    return replace(captured, program=extended)


def _variants(captured: Captured, keep: str, rows: int | None) -> Iterator[Chunk]:
    bodies: dict[str, Chunk] = {}
    modules = _modules(captured, keep)
    for chunk in captured.program.chunks:
        code = captured.code.variant(chunk.code, keep, _inside(captured, chunk, modules))
        body = bodies.get(code)
        if body is None:
            body = bodies[code] = (
                _body(captured, chunk, keep, code)
                if rows is None
                else traced_at(captured.code, chunk, code, rows)
            )
        yield replace(chunk, ports=body.ports, steps=body.steps, code=body.code, keep=keep)


def _modules(captured: Captured, keep: str) -> list[set[int]] | None:
    """Return for each policy its modules with all inside of them, by their ids; None for one that holds everywhere."""
    if WITHIN not in keep:
        return None
    return [_inner(captured, one.partition(WITHIN)[2]) for one in keep.split(BESIDE)]


def _inner(captured: Captured, patterns: str) -> set[int]:
    model = captured.forward.model
    every = {name: m for name, m in model.named_modules(remove_duplicate=False) if name}
    ran = {module for node in captured.forward.graph.nodes for module in _stack(node)}
    chosen: set[int] = set()
    for pattern in patterns.split("+"):
        found = [m for name, m in every.items() if matches(pattern, name)]
        inner = {id(i) for m in found for i in m.modules()}
        if not inner & ran:
            problem = "no module matches" if not found else "no operation runs inside of"
            runs = [name for name, m in every.items() if id(m) in ran]
            raise SelectorError(
                f"modules={pattern!r}: {problem} {pattern!r}; the model runs {examples(runs)}. Names are "
                f'matched as those of files: "*.mlp" means layers.0.mlp, layers.1.mlp and so on'
            )
        chosen |= inner
    return chosen


def _stack(node: fx.Node) -> Iterator[int]:
    """Yield the ids of the modules that run an operation."""
    return (int(key.partition("@")[0]) for key in node.meta.get("nn_module_stack") or {})


def _inside(
    captured: Captured, chunk: Chunk, modules: Sequence[set[int]] | None
) -> tuple[tuple[int, ...], ...] | None:
    """Return for each policy the places in a chunk's body of its operations, without an earlier policy's."""
    if modules is None or EMPTY in chunk.coords:
        return None
    cut = captured.code.recipe(chunk.code).cut
    (piece,) = (piece for piece in cut.pieces if piece.region.id == chunk.id)
    places: list[list[int]] = [[] for _ in modules]
    for k, node in enumerate(cut.body(piece)):
        stack = {*_stack(node)}
        own = next((n for n, inside in enumerate(modules) if inside & stack), None)
        if own is not None:
            places[own].append(k)
    return tuple(map(tuple, places))


def _body(captured: Captured, chunk: Chunk, keep: str, code: str) -> Chunk:
    """Return a chunk with its ports and steps under a policy; equal steps are shared with the original."""
    problem: CaptureError | None = None
    for rows in TRACE_ROWS:
        traces = {r: captured.code.trace(code, r) for r in rows}
        fitter = Fitter(rows, (traces[rows[0]], traces[rows[1]], traces[rows[2]]))
        try:
            ports, steps = fitter.ports(), fitter.steps()
        except NotAffine as error:
            problem = problem or explain(error, chunk.id, traces)
            continue
        shared = {
            s: known if sig == (known := chunk.steps.get(s)) else sig for s, sig in steps.items()
        }
        body = replace(
            chunk,
            ports=chunk.ports if ports == chunk.ports else ports,
            steps=shared,
            code=code,
            keep=keep,
        )
        captured.code.expect(code, body)
        return body
    assert problem is not None
    raise problem
