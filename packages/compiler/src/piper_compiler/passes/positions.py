"""Where communication stands in a role's program order.

The communication of a role follows the global order of transfers, so that the issue orders of all ranks, restricted to
communication, are projections of one order (what NCCL needs: rule 21, trap 45). Within that: a send or a reduction comes right
after the compute that it needs; a receive `recv_ahead` compute instructions before its first reader, or as early as can be
when it has no bytes; never so late that what follows it would be late (rule 23).
"""

from __future__ import annotations

from itertools import accumulate

from piper_compiler.passes.dependencies import Dependencies
from piper_compiler.passes.fuse import Task
from piper_ir.graph import Graph
from piper_ir.ops import AllReduce, Recv
from piper_ir.sizes import bind

Positions = dict[str, list[tuple[int, int]]]
"""Role -> (node, p) in issue order: the communication is issued right before compute instruction p."""


def positions(graph: Graph, deps: Dependencies, sequence: list[int], tasks: dict[str, list[Task]], recv_ahead: int) -> Positions:
    """Places for all communication of a graph."""
    task_of = [-1] * len(sequence)  # compute node -> index of its instruction among the role's compute
    for work in tasks.values():
        for k, task in enumerate(work):
            for i in task:
                task_of[i] = k
    place = [0] * len(sequence)
    for k, i in enumerate(sequence):
        place[i] = k
    comm: dict[str, list[tuple[int, int, int]]] = {role: [] for role in graph.roles}
    of, before = deps.of, deps.before
    mine = [comm[n.role] if n.role else [] for n in deps.nodes]
    receives = [isinstance(n.op, Recv) for n in deps.nodes]
    for i, is_comm in enumerate(deps.comm):
        if is_comm:  # a receive stands where its send does
            k = of[i]
            mine[k].append((place[before[i][0]] if receives[k] else place[i], place[i], i))
    early = _early(graph, deps, recv_ahead)
    reduced = [isinstance(n.op, AllReduce) for n in deps.nodes]
    out = {}
    for role, nodes in comm.items():
        nodes.sort()
        out[role] = _placed(deps, [i for *_, i in nodes], task_of, early, reduced)
    return out


def _early(graph: Graph, deps: Dependencies, recv_ahead: int) -> list[int]:
    """Of each receive of `deps.nodes`, how many compute instructions before its reader it is wanted; -1 of all else."""
    out = [-1] * len(deps.nodes)
    for k, node in enumerate(deps.nodes):
        if isinstance(node.op, Recv):
            out[k] = recv_ahead if bind(graph.values[node.writes[0]].spec.nbytes, 1) else 1 << 60
    return out


def _placed(
    deps: Dependencies, nodes: list[int], task_of: list[int], early: list[int], reduced: list[bool]
) -> list[tuple[int, int]]:
    wanted: list[int] = []
    latest: list[int] = []
    for i in nodes:
        k = deps.of[i]
        if early[k] >= 0:
            reader = min([task_of[j] for j in deps.after[i] if task_of[j] >= 0])
            wanted.append(reader - early[k] if reader > early[k] else 0)
            latest.append(reader)
        else:
            need = max([task_of[j] for j in deps.before[i]], default=-1) + 1
            wanted.append(need)
            latest.append(1 << 60 if reduced[k] else need)
    bound = 1 << 60
    for at in reversed(range(len(nodes))):
        bound = min(bound, latest[at])
        if early[deps.of[nodes[at]]] >= 0:
            wanted[at] = min(wanted[at], bound)
    return list(zip(nodes, accumulate(wanted, max), strict=True))
