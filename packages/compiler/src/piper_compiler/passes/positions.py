"""Where communication stands in a role's program order.

The communication of a role follows the global order of transfers, so that the issue orders of all ranks, restricted to
communication, are projections of one order (what NCCL needs: rule 21, trap 45). Within that: a send or a reduction comes right
after the compute that it needs; a receive `recv_ahead` compute instructions before its first reader, or as early as can be
when it has no bytes; never so late that what follows it would be late (rule 23).
"""

from __future__ import annotations

from dataclasses import dataclass

from piper_compiler.passes.dependencies import Dependencies
from piper_compiler.passes.fuse import Task
from piper_ir.graph import Graph
from piper_ir.ops import AllReduce, Recv
from piper_ir.sizes import bind


@dataclass(frozen=True)
class Positions:
    """`task_of`: compute node -> index of its instruction among the role's compute. `comm`: role -> (node, p) in issue order: the
    communication is issued right before compute instruction p."""

    task_of: dict[int, int]
    comm: dict[str, list[tuple[int, int]]]


def positions(graph: Graph, deps: Dependencies, sequence: list[int], tasks: dict[str, list[Task]], recv_ahead: int) -> Positions:
    """Places for all communication of a graph."""
    task_of = {i: k for mine in tasks.values() for k, task in enumerate(mine) for i in task}
    place = [0] * len(sequence)
    for k, i in enumerate(sequence):
        place[i] = k
    comm: dict[str, list[tuple[int, int, int]]] = {role: [] for role in graph.roles}
    roles, ops = [n.role for n in deps.nodes], [n.op for n in deps.nodes]
    receives = [isinstance(op, Recv) for op in ops]
    for i, is_comm in enumerate(deps.comm):
        if is_comm:  # a receive stands where its send does
            k = deps.of[i]
            comm[roles[k]].append((place[deps.before[i][0] if receives[k] else i], place[i], i))
    early = _early(graph, deps, recv_ahead)
    reduced = [isinstance(op, AllReduce) for op in ops]
    out = {}
    for role, nodes in comm.items():
        nodes.sort()
        out[role] = _placed(deps, [i for *_, i in nodes], task_of, early, reduced)
    return Positions(task_of, out)


def _early(graph: Graph, deps: Dependencies, recv_ahead: int) -> list[int]:
    """Of each receive of `deps.nodes`, how many compute instructions before its reader it is wanted; -1 of all else."""
    out = [-1] * len(deps.nodes)
    for k, node in enumerate(deps.nodes):
        if isinstance(node.op, Recv):
            out[k] = recv_ahead if bind(graph.values[node.writes[0]].spec.nbytes, 1) else 1 << 60
    return out


def _placed(
    deps: Dependencies, nodes: list[int], task_of: dict[int, int], early: list[int], reduced: list[bool]
) -> list[tuple[int, int]]:
    wanted: list[int] = []
    latest: list[int] = []
    for i in nodes:
        k = deps.of[i]
        if early[k] >= 0:
            reader = min([task_of[j] for j in deps.after[i] if j in task_of])
            wanted.append(max(0, reader - early[k]))
            latest.append(reader)
        else:
            need = max([task_of[j] + 1 for j in deps.before[i] if j in task_of], default=0)
            wanted.append(need)
            latest.append(1 << 60 if reduced[k] else need)
    bound = 1 << 60
    for at in reversed(range(len(nodes))):
        bound = min(bound, latest[at])
        if early[deps.of[nodes[at]]] >= 0:
            wanted[at] = min(wanted[at], bound)
    out, floor = [], 0
    for i, p in zip(nodes, wanted, strict=True):
        floor = max(floor, p)
        out.append((i, floor))
    return out
