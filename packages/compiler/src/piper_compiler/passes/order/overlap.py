"""Decide how the members of an `overlap` are interleaved.

If chunks have given durations (synthetic programs), the members of a group are a *span*: one instruction for a forward
and a backward, with the pair's given duration. Else the compiler interleaves the members: it lowers the graph under
each of a few interleavings, and keeps the one whose plan the timing sweep finishes first. Of equals it keeps `hidden`,
else the earliest in this list: in a short step another device may decide when it ends.

    free         as list scheduling does when the members are not ordered at all
    in turn      one member after the other, as written
    reversed     one member after the other, from the last
    alternating  the members side by side, in proportion to their durations
    hidden       if messages stand between nodes of a member: another computes while they are on their way
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, TypeVar

from piper_compiler.durations import chunk_seconds
from piper_compiler.passes.order.hiding import hidden, messages_of
from piper_compiler.passes.steps.dependencies import Dependencies, given
from piper_compiler.ports import steps_of
from piper_ir.graph.graph import At, Graph, Node, OverlapGroup
from piper_ir.ground.errors import CompileError, PlanError
from piper_ir.program.ops import Compute
from piper_ir.program.program import Chunk, Program, Step

Merge = Callable[[OverlapGroup, Mapping[At, float]], Sequence[At]]


def seconds_of_spans(
    graph: Graph, chunks: Mapping[str, Chunk], deps: Dependencies
) -> dict[int, float]:
    """Return the seconds of each span, by its first number."""
    distinct = set(deps.spans.values())
    return {
        span[0]: span_seconds(graph.program, chunks, [(deps.node(i), deps.mb[i]) for i in span])
        for span in distinct
    }


def span_seconds(
    program: Program, chunks: Mapping[str, Chunk], span: Iterable[tuple[Node, int]]
) -> float:
    """Return the seconds of a span of these nodes in microbatches.

    One forward of stage s and one whole backward of stage t save the mean of the savings of both stages' own pairs, so
    that equal stages take the `overlap` of the program. Any other span takes the sum.
    """
    forwards, backwards = list[_Unit](), list[_Unit]()
    total = 0.0
    for node, mb in span:
        if isinstance(node.op, Compute):
            chunk = chunks[node.op.variant]
            steps = steps_of(chunk, node.op.step, node.op.apart)
            total += sum(chunk_seconds(chunk, s) for s in steps)
            (forwards if node.op.step == "F" else backwards).append((chunk, mb, steps))
    if not program.overlap or len(forwards) != 1 or not _whole(backwards):
        return total
    stages = [
        k
        for chunk, *_ in (forwards[0], backwards[0])
        for k, c in enumerate(program.chunks)
        if c.id == chunk.id
    ]
    return total - sum(_saved(program, chunks, k) for k in stages) / 2


_Unit = tuple[Chunk, int, tuple[Step, ...]]
"""A chunk, a microbatch, and steps of the chunk."""


def _whole(backwards: Sequence[_Unit]) -> bool:
    """Return whether these are all steps of the backward of one chunk for one microbatch."""
    if len({(chunk.id, mb) for chunk, mb, _ in backwards}) != 1:
        return False
    return tuple([s for *_, steps in backwards for s in steps]) == steps_of(backwards[0][0], "B")


def _saved(program: Program, chunks: Mapping[str, Chunk], stage: int) -> float:
    chunk = chunks[program.chunks[stage].id]
    return sum(chunk_seconds(chunk, s) for s in chunk.steps) - program.overlap[stage]


class _Timed(Protocol):
    """Describe the result for one interleaving: it has a makespan."""

    @property
    def makespan(self) -> float: ...


D = TypeVar("D", bound=_Timed)


@dataclass(frozen=True)
class Interleaved:
    """Hold a graph with interleaved members of overlaps, and whether that was to hide messages."""

    graph: Graph
    hides: bool = False


def first_to_finish(orders: Iterable[Interleaved], drafted: Callable[[Graph], D]) -> D:
    """Return the draft that the timing sweep finishes first; of equals one that hides messages, else the earliest."""
    best: D | None = None
    for order in orders:
        try:
            draft = drafted(order.graph)
            if best is None or draft.makespan < best.makespan * (
                1 + 1e-9 if order.hides else 1 - 1e-9
            ):
                best = draft
        except (CompileError, PlanError):
            if best is None:
                raise  # nothing is chosen yet here, so it is the strategy's own contradiction
            # this interleaving would wait for itself
    assert best is not None, "there is always the graph as it is"
    return best


def interleavings(graph: Graph, seconds: Mapping[At, float]) -> Iterator[Interleaved]:
    """Yield the graphs to choose from, first the graph as it is; it is the only one if nothing is left open.

    `seconds` has the duration of each compute node of an overlap, and of each collective that such nodes wait for.
    """
    yield Interleaved(graph)
    if not graph.overlaps or given(graph.program):
        return
    for merge in MERGES:
        yield Interleaved(_merged(graph, [merge(group, seconds) for group in graph.overlaps]))
    hidden_orders = [
        hidden(group, seconds, messages_of(graph, group, seconds)) for group in graph.overlaps
    ]
    if any(order is not None for order in hidden_orders):
        orders = [
            order or group.nodes for order, group in zip(hidden_orders, graph.overlaps, strict=True)
        ]
        yield Interleaved(_merged(graph, orders), hides=True)


def _merged(graph: Graph, orders: Iterable[Sequence[At]]) -> Graph:
    """Return the graph with the nodes of each group in the group's given order."""
    edges = dict(graph.order_edges)
    for group, order in zip(graph.overlaps, orders, strict=True):
        for pair in pairwise(order):
            edges.setdefault(pair, group.applied)
    return replace(graph, order_edges=edges)


def _alternating(group: OverlapGroup, seconds: Mapping[At, float]) -> list[At]:
    """Return the nodes ordered by their middle, as a fraction of their member's time."""
    places: list[tuple[float, int, int, At]] = []
    for k, member in enumerate(group.members):
        total, done = sum(seconds[at] for at in member) or 1.0, 0.0
        for n, at in enumerate(member):
            places.append(((done + seconds[at] / 2) / total, k, n, at))
            done += seconds[at]
    return [at for *_, at in sorted(places)]


MERGES: tuple[Merge, ...] = (
    lambda group, _: group.nodes,
    lambda group, _: [at for member in reversed(group.members) for at in member],
    _alternating,
)
"""The orders to try for a group: in turn, reversed, alternating."""
