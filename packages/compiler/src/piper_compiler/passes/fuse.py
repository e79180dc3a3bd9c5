"""fuse: join neighbouring compute of one role, microbatch and phase into one instruction, wherever nothing lies between.

Something lies between two neighbours when communication must start after the first (it is sent, or was the last to add into a
bucket that is reduced), or must end before the second (it is the first to read what was received or reduced). Parts keep their
order, so results are bit-equal. A span is one instruction, always.
"""

from __future__ import annotations

from piper_compiler.passes.dependencies import Dependencies
from piper_ir.graph import Graph
from piper_ir.ops import SquaredNorm, Update

Task = list[int]
"""Node numbers that one compute instruction runs, in order."""


def tasks(graph: Graph, deps: Dependencies, sequence: list[int], fuse: bool) -> dict[str, list[Task]]:
    """Role -> its compute instructions in order; one node each unless `fuse`."""
    place = {i: k for k, i in enumerate(sequence)}
    ends = _last_before_reductions(graph, deps, place) | _senders(deps)
    roles = deps.column([n.role for n in deps.nodes])
    phases = deps.column([n.coords.get("phase") for n in deps.nodes])
    alone = [isinstance(n.op, Update) for n in deps.nodes]
    waits = [isinstance(n.op, SquaredNorm | Update) for n in deps.nodes]
    out: dict[str, list[Task]] = {role: [] for role in graph.roles}
    received: set[int] = set()
    for i in sequence:
        if deps.comm[i]:
            continue
        mine = out[roles[i]]
        fresh = _fresh(deps, i, received) or waits[deps.of[i]]
        if i in deps.spans:
            if i == deps.spans[i][0]:
                mine.append(list(deps.spans[i]))
            continue
        last = mine[-1][-1] if mine else -1
        alike = mine and deps.mb[last] == deps.mb[i] and phases[last] == phases[i] and not alone[deps.of[i]]
        if fuse and alike and not fresh and last not in ends and last not in deps.spans:
            mine[-1].append(i)
        else:
            mine.append([i])
    return out


def _senders(deps: Dependencies) -> set[int]:
    """The nodes of which a communication carries a value."""
    carry = [bool(n.reads) for n in deps.nodes]
    return {j for i, comm in enumerate(deps.comm) if comm and carry[deps.of[i]] for j in deps.before[i]}


def _last_before_reductions(graph: Graph, deps: Dependencies, place: dict[int, int]) -> set[int]:
    """The nodes that are the last of their role to add into a bucket which is then reduced."""
    return {
        max(nodes, key=place.__getitem__) for (bucket, _), nodes in deps.accumulators.items() if graph.buckets[bucket].channel
    }


def _fresh(deps: Dependencies, i: int, received: set[int]) -> bool:
    """Whether the node must wait for a communication for which nothing before it on its role has waited."""
    out = False
    for j in deps.before[i]:
        if deps.comm[j] and j not in received:
            received.add(j)
            out = True
    return out
