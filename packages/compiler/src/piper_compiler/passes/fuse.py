"""fuse: join neighbouring compute of one role, microbatch and phase into one instruction, wherever nothing lies between.

Something lies between two neighbours when communication must start after the first (it is sent, or was the last to add into a
bucket that is reduced), or must end before the second (it is the first to read what was received or reduced). Parts keep their
order, so results are bit-equal.
"""

from __future__ import annotations

from piper_compiler.passes.dependencies import Dependencies
from piper_ir.graph import Graph, Node
from piper_ir.ops import COMM, SquaredNorm, Update

Task = list[int]
"""Node numbers that one compute instruction runs, in order."""


def tasks(graph: Graph, deps: Dependencies, sequence: list[int], fuse: bool) -> dict[str, list[Task]]:
    """Role -> its compute instructions in order; one node each unless `fuse`."""
    place = {i: k for k, i in enumerate(sequence)}
    feeds_comm = _last_before_reductions(graph, deps, place)
    feeds_comm |= {i for i, after in enumerate(deps.after) if any(_sends(deps, i, j) for j in after)}
    out: dict[str, list[Task]] = {role: [] for role in graph.roles}
    received: set[tuple[str, str]] = set()
    for i in sequence:
        node = deps.nodes[i]
        if isinstance(node.op, COMM):
            continue
        fresh = _fresh(graph, deps, node, received)
        mine = out[node.role]
        if fuse and mine and not fresh and mine[-1][-1] not in feeds_comm and _alike(deps.nodes[mine[-1][-1]], node):
            mine[-1].append(i)
        else:
            mine.append([i])
    return out


def _alike(a: Node, b: Node) -> bool:
    keys = ("phase", "mb")
    return not isinstance(b.op, Update) and all(a.coords.get(k) == b.coords.get(k) for k in keys)


def _sends(deps: Dependencies, i: int, j: int) -> bool:
    """Whether node j is a communication that carries a value of node i."""
    return isinstance(deps.nodes[j].op, COMM) and any(v in deps.nodes[i].writes for v in deps.nodes[j].reads)


def _last_before_reductions(graph: Graph, deps: Dependencies, place: dict[int, int]) -> set[int]:
    """The nodes that are the last of their role to add into a bucket which is then reduced."""
    return {
        max(nodes, key=place.__getitem__) for (bucket, _), nodes in deps.accumulators.items() if graph.buckets[bucket].channel
    }


def _fresh(graph: Graph, deps: Dependencies, node: Node, received: set[tuple[str, str]]) -> bool:
    """Whether the node must wait for a communication for which nothing before it on its role has waited."""
    out = isinstance(node.op, SquaredNorm | Update)
    for v in node.reads:
        writer = graph.writer.get(v)
        if writer is not None and isinstance(graph.nodes[writer].op, COMM) and (node.role, v) not in received:
            received.add((node.role, v))
            out = True
    return out
