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
    ends = _last_before_reductions(graph, deps, sequence) | _senders(deps)
    roles = deps.column([n.role for n in deps.nodes])
    phases = deps.column([n.coords.get("phase") for n in deps.nodes])
    alone = [isinstance(n.op, Update) for n in deps.nodes]
    waits = [isinstance(n.op, SquaredNorm | Update) for n in deps.nodes]
    out: dict[str, list[Task]] = {role: [] for role in graph.roles}
    received: set[int] = set()
    of, mb, comm, before, spans = deps.of, deps.mb, deps.comm, deps.before, deps.spans
    for i in sequence:
        if comm[i]:
            continue
        mine = out[roles[i]]
        fresh = [j for j in before[i] if comm[j] and j not in received]  # nothing before it on its role has waited for these
        if fresh:
            received.update(fresh)
        if i in spans:
            if i == spans[i][0]:
                mine.append(list(spans[i]))
            continue
        last = mine[-1][-1] if mine else -1
        joins = fuse and mine and not fresh and last not in ends and last not in spans
        if joins and mb[last] == mb[i] and phases[last] == phases[i] and not waits[of[i]] and not alone[of[i]]:
            mine[-1].append(i)
        else:
            mine.append([i])
    return out


def _senders(deps: Dependencies) -> set[int]:
    """The nodes of which a communication carries a value."""
    carry = [bool(n.reads) for n in deps.nodes]
    return {j for i, comm in enumerate(deps.comm) if comm and carry[deps.of[i]] for j in deps.before[i]}


def _last_before_reductions(graph: Graph, deps: Dependencies, sequence: list[int]) -> set[int]:
    """The nodes that are the last of their role to add into a bucket which is then reduced."""
    reduced = [nodes for (bucket, _), nodes in deps.accumulators.items() if graph.buckets[bucket].channel]
    place = {i: k for k, i in enumerate(sequence)} if reduced else {}
    return {max(nodes, key=place.__getitem__) for nodes in reduced}
