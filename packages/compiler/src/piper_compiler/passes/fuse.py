"""fuse: join neighbouring compute of one role, microbatch and phase into one instruction, wherever nothing lies between.

Something lies between two neighbours when communication must start after the first (it is sent, or was the last to add into a
bucket that is reduced), or must end before the second (it is the first to read what was received or reduced). Parts keep their
order, so results are bit-equal.
"""

from __future__ import annotations

from piper_compiler.passes.dependencies import Dependencies
from piper_ir.graph import Graph, Node
from piper_ir.ops import SquaredNorm, Update

Task = list[int]
"""Node numbers that one compute instruction runs, in order."""


def tasks(graph: Graph, deps: Dependencies, sequence: list[int], fuse: bool) -> dict[str, list[Task]]:
    """Role -> its compute instructions in order; one node each unless `fuse`."""
    place = {i: k for k, i in enumerate(sequence)}
    ends = _last_before_reductions(graph, deps, place) | _senders(deps)
    arriving = {v for i, comm in enumerate(deps.comm) if comm for v in deps.nodes[i].writes}
    out: dict[str, list[Task]] = {role: [] for role in graph.roles}
    received: set[tuple[str, str]] = set()
    for i in sequence:
        if deps.comm[i]:
            continue
        node = deps.nodes[i]
        mine = out[node.role]
        fresh = _fresh(node, arriving, received)
        if fuse and mine and not fresh and mine[-1][-1] not in ends and _alike(deps.nodes[mine[-1][-1]], node):
            mine[-1].append(i)
        else:
            mine.append([i])
    return out


def _alike(a: Node, b: Node) -> bool:
    if isinstance(b.op, Update):
        return False
    return a.coords.get("mb") == b.coords.get("mb") and a.coords.get("phase") == b.coords.get("phase")


def _senders(deps: Dependencies) -> set[int]:
    """The nodes of which a communication carries a value."""
    made_by = deps.made
    return {made_by[v] for i, comm in enumerate(deps.comm) if comm for v in deps.nodes[i].reads if v in made_by}


def _last_before_reductions(graph: Graph, deps: Dependencies, place: dict[int, int]) -> set[int]:
    """The nodes that are the last of their role to add into a bucket which is then reduced."""
    return {
        max(nodes, key=place.__getitem__) for (bucket, _), nodes in deps.accumulators.items() if graph.buckets[bucket].channel
    }


def _fresh(node: Node, arriving: set[str], received: set[tuple[str, str]]) -> bool:
    """Whether the node must wait for a communication for which nothing before it on its role has waited. `arriving`: the values
    that communication writes."""
    out = isinstance(node.op, SquaredNorm | Update)
    for v in node.reads:
        if v in arriving and (node.role, v) not in received:
            received.add((node.role, v))
            out = True
    return out
