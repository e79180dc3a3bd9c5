"""overlap: what becomes of the groups that an order leaves open.

Where chunks have given durations (synthetic programs) the members of a group are a *span*: one instruction, in which a forward
and a backward take the pair's given duration. Elsewhere the compiler interleaves the members: it lowers the graph under each of
a few interleavings, and keeps the one whose plan the timing sweep finishes first, the earliest in this list among equals.

    free         what list scheduling does when the members are not ordered at all
    in turn      one member after the other, as written
    reversed     one member after the other, from the last
    alternating  the members side by side, in proportion to their durations
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from piper_compiler.durations import chunk_seconds
from piper_compiler.ports import steps_of
from piper_ir.graph import Graph, Node, OverlapGroup
from piper_ir.ops import Compute
from piper_ir.program import Chunk, Program, Step

Merge = Callable[[OverlapGroup, Mapping[str, float]], Sequence[str]]


def spans(graph: Graph) -> list[tuple[str, ...]]:
    """The groups that run as one instruction, forward first."""
    if not _given(graph.program):
        return []
    return [tuple(sorted(group.nodes, key=lambda id: graph.position(graph.nodes[id]))) for group in graph.overlaps]


def span_seconds(program: Program, chunks: Mapping[str, Chunk], span: Iterable[Node]) -> float:
    """Seconds of a span of these nodes. One forward of stage s and one whole backward of stage t save half of what a pair of each
    stage saves, so that equal stages take the `overlap` of the program; anything else takes the sum."""
    forwards, backwards = list[_Unit](), list[_Unit]()
    total = 0.0
    for node in span:
        if isinstance(node.op, Compute):
            chunk = chunks[node.op.chunk]
            steps = steps_of(chunk, node.op.step)
            total += sum(chunk_seconds(chunk, s) for s in steps)
            (forwards if node.op.step == "F" else backwards).append((chunk, node.mb, steps))
    if not program.overlap or len(forwards) != 1 or not _whole(backwards):
        return total
    stages = [k for chunk, *_ in (forwards[0], backwards[0]) for k, c in enumerate(program.chunks) if c.id == chunk.id]
    return total - sum(_saved(program, chunks, k) for k in stages) / 2


_Unit = tuple[Chunk, int, tuple[Step, ...]]
"""A chunk, a microbatch, and steps of it."""


def _whole(backwards: Sequence[_Unit]) -> bool:
    """Whether they are all steps of the backward of one chunk for one microbatch."""
    if len({(chunk.id, mb) for chunk, mb, _ in backwards}) != 1:
        return False
    return tuple([s for *_, steps in backwards for s in steps]) == steps_of(backwards[0][0], "B")


def _saved(program: Program, chunks: Mapping[str, Chunk], stage: int) -> float:
    chunk = chunks[program.chunks[stage].id]
    return sum(chunk_seconds(chunk, s) for s in chunk.steps) - program.overlap[stage]


def _given(program: Program) -> bool:
    return all(chunk.steps["F"].cost.seconds is not None for chunk in program.chunks)


def interleavings(graph: Graph, seconds: Mapping[str, float]) -> Iterator[Graph]:
    """The graphs to choose from, first the graph as it is, which is all where nothing is left open. `seconds`: per compute
    node of an overlap."""
    yield graph
    if not graph.overlaps or _given(graph.program):
        return
    for merge in MERGES:
        edges = dict(graph.order_edges)
        for group in graph.overlaps:
            for before, after in pairwise(merge(group, seconds)):
                edges.setdefault((before, after), group.applied)
        yield replace(graph, order_edges=edges)


def _alternating(group: OverlapGroup, seconds: Mapping[str, float]) -> list[str]:
    """By the middle of each node, as a fraction of its member's time."""
    places: list[tuple[float, int, int, str]] = []
    for k, member in enumerate(group.members):
        total, done = sum(seconds[id] for id in member) or 1.0, 0.0
        for n, id in enumerate(member):
            places.append(((done + seconds[id] / 2) / total, k, n, id))
            done += seconds[id]
    return [id for *_, id in sorted(places)]


MERGES: tuple[Merge, ...] = (
    lambda group, _: group.nodes,
    lambda group, _: [id for member in reversed(group.members) for id in member],
    _alternating,
)
"""In turn, reversed, alternating."""
