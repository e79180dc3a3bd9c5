"""Refuse a model whose forward keeps state that changes the computation of a later call.

A model is captured once, so every step of a plan repeats the computation of the first call. If the traced code changes
anything that existed before, it is traced again on the model as the first call left it. Both traces must compute the
same. A tensor that the first call made of constants and kept counts as these constants: it is the same whenever it is
made.

If the second call leaves everything as it found it, all later calls are like it. State that it changes once more, such
as a counter or a list that grows, is made unknown, and the call is traced again, until nothing else changes. A trace
that comes to its end with this state unknown computes the same in every call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from piper_capture.chunks.regions import operations
from piper_capture.chunks.replay import ReplayFacts, replay
from piper_capture.torch_api import _torch
from piper_capture.torch_api._torch import Change
from piper_capture.trace.dynamo import Forward, Repeat
from piper_capture.values.concrete import canonical_text
from piper_capture.values.varying_values import UnknownRead
from piper_ir.ground.errors import CaptureError

ADVICE = (
    "A model is captured once, so every step would compute what the first one did. Make it a buffer of fixed size "
    "(register_buffer) that forward updates, or compute it anew in every forward"
)


MOST_CALLS = 10
"""The number of traced calls after which a model is refused if each of them changes something else."""


def check_steady(first: Forward) -> None:
    """Trace the next calls if forward changed something.

    Raises CaptureError if one of them differs from the first in its computation, or may do so.
    """
    cached = [
        node
        for node in first.graph.nodes
        if _torch.CACHED in node.meta and node.op != "placeholder"
    ]
    if first.repeat is None and not cached:
        return
    try:
        wanted = transcript(first, {})
        _check_cached(
            [node for node in cached if node in wanted.texts and node not in wanted.constants]
        )
        if first.repeat is not None:
            _compare_calls(wanted, first.repeat)
            _check_rows(first, first.repeat)
    finally:
        if first.repeat is not None:
            first.repeat.state.restore()


def _check_cached(changing: Sequence[fx.Node]) -> None:
    """Raise CaptureError for results that a cache would keep, though they differ in every step."""
    for node in changing:
        name, line = node.meta[_torch.CACHED]
        raise CaptureError(
            f"{line}: {name} is under functools.lru_cache, and what it returns is made of parameters, of the "
            f"batch, of buffers that change or of random numbers. In plain PyTorch the cache returns the first "
            f"call's result again and again, in a plan it is computed in every step. Take lru_cache away; it may "
            f"stay for constants"
        )


def _check_rows(first: Forward, repeat: Repeat) -> None:
    """Raise CaptureError if a later call is like the first only with the same number of rows."""
    rows = [
        n.meta["example_value"].shape[0]
        for n, o in first.origins.items()
        if o.kind == "batch" and o.name not in first.fixed
    ]
    if not all(map(_torch.is_symbolic, rows)):
        changes = list(repeat.state.changes.values())
        raise CaptureError(
            f"{_subject(changes, [])}, and its next call compares the number of rows with that of the call before, "
            f"while microbatches may differ in it. Keep nothing of the size of a batch between calls, or make it "
            f"anew in every forward"
        )


def _compare_calls(wanted: Transcript, repeat: Repeat) -> None:
    state = repeat.state
    unknown: list[Change] = []
    for _ in range(MOST_CALLS):
        try:
            again = repeat.trace()
        except (CaptureError, UnknownRead) as error:
            if unknown:
                raise CaptureError(
                    f"{_subject(unknown, [])} in every call and computes with it{_where(error)}. {ADVICE}"
                ) from error
            changes = list(state.changes.values())
            raise CaptureError(
                f"{_subject(changes, [])}; its next call cannot be captured: {error}. {ADVICE}"
            ) from error
        texts = {
            name: wanted.texts[node]
            for name, node in again.kept.items()
            if node in wanted.constants
        }
        if transcript(again, texts).lines != wanted.lines:
            kept = [o.name for o in again.origins.values() if o.kind == "kept"]
            read = [name for name in kept if name not in texts] or kept
            changes = unknown or list(state.changes.values())
            raise CaptureError(
                f"{_subject(changes, read)} and computes something else the next time. {ADVICE}"
            )
        moving = state.moving()
        if not moving:
            return
        if fixed := [change for change in moving if not state.forget(change)]:
            raise CaptureError(
                f"{_subject(fixed, [])} in every call, and whether it computes with it is not known. {ADVICE}"
            )
        unknown += moving
    raise CaptureError(f"{_subject(unknown, [])} and something else in every call. {ADVICE}")


def _where(error: BaseException) -> str:
    """Return the user's line of an error, in parentheses."""
    line, separator, _ = str(error).partition(": cannot be captured")
    return f" ({line})" if separator and "\n" not in line else ""


def _subject(changes: Sequence[Change], kept: Sequence[str]) -> str:
    """Return a text with the line and the names that forward changes; `kept` are the names that the next call reads."""
    holders = [c for c in changes if any(_holds(c.name, k) for k in kept)]
    shown = holders or list(changes)
    names = [k for k in kept if holders] or dict.fromkeys(c.name for c in shown)
    line = next((f"{c.line}: " for c in shown if c.line), "")
    return f"{line}forward changes {', '.join(names)}"


def _holds(changed: str, kept: str) -> bool:
    """Return whether `changed` is the kept tensor or holds it; register_buffer changes "_buffers" of a module."""
    module, _, last = changed.rpartition(".")
    if last == "_buffers":
        return kept.rpartition(".")[0] == module
    return kept == changed or kept.startswith((f"{changed}.", f"{changed}["))


@dataclass
class Transcript:
    """Write down the computation of a graph, without names.

    Attributes:
        lines: the results, and the operations on anything but constants.
        texts: node -> its text in the lines; for a constant, its origin with everything that is written to it.
        constants: nodes whose tensors are the same in every step.
    """

    lines: list[str] = field(default_factory=list)
    texts: dict[fx.Node, str] = field(default_factory=dict)
    constants: set[fx.Node] = field(default_factory=set)


def transcript(forward: Forward, kept: Mapping[str, str]) -> Transcript:
    """Return the transcript of a graph; `kept` has texts for tensors that an earlier call made of constants."""
    ops = operations(forward.graph)
    facts = replay(forward, ops.statements)
    record = Transcript(constants=_constants(forward, ops.nodes, facts, kept))
    for node, origin in forward.origins.items():
        record.texts[node] = kept.get(origin.name) or f"{origin.kind} {origin.name}"
    for node in ops.nodes:
        if node.op == "get_attr":
            line = str(getattr(forward.owner, str(node.target)))
        else:
            line = f"{ops.grad_mode[node]} {canonical_text(node, record.texts)}"
        if node not in record.constants:
            record.lines.append(line)
            record.texts[node] = f"%{len(record.lines)}"
            continue
        record.texts[node] = _digest(line.partition(" ")[2])
        for other in record.constants:
            if (
                other is not node
                and other in record.texts
                and facts.storages[other] & facts.writes[node]
            ):
                record.texts[other] = _digest(record.texts[other] + line)
    results = [*forward.results, *(node for _, node in sorted(forward.rewrites.items()))]
    record.lines += [record.texts[n] for n in results]
    return record


def _digest(text: str) -> str:
    return f"constant {hashlib.sha256(text.encode()).hexdigest()}"


def _constants(
    forward: Forward, nodes: Iterable[fx.Node], facts: ReplayFacts, kept: Mapping[str, str]
) -> set[fx.Node]:
    """Return the nodes whose tensors are the same in every step.

    They are made from nothing, from other constants, or from parameters and buffers that nothing changes.
    """
    trained = {p.name for p in forward.params if p.requires_grad}
    leaves = {
        n
        for n, o in forward.origins.items()
        if o.name in kept
        or (o.kind == "param" and o.name not in trained)
        or (o.kind == "buffer" and o.name not in forward.rewrites)
    }
    order, changing = list(nodes), frozenset[int]()
    while True:
        constants = {n for n in leaves if not facts.storages[n] & changing}
        for node in order:
            sources = [n for n in node.all_input_nodes if n in facts.storages]
            steady = (
                node.op != "get_attr"
                and node not in facts.random
                and all(n in constants for n in sources)
            )
            if steady and not (facts.storages[node] | facts.writes[node]) & changing:
                constants.add(node)
        written = frozenset().union(
            *(facts.writes[n] for n in order if n not in constants),
            *(facts.writes[n] & facts.storages[leaf] for n in order for leaf in leaves),
        )
        if written <= changing:
            return constants
        changing |= written
