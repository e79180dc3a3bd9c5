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
    place = {i: k for k, i in enumerate(sequence)}
    comm: dict[str, list[tuple[int, int, int]]] = {role: [] for role in graph.roles}
    for i, is_comm in enumerate(deps.comm):
        if is_comm:  # a receive stands where its send does
            node = deps.nodes[i]
            source = deps.number[f"send.{node.writes[0]}"] if isinstance(node.op, Recv) else i
            comm[node.role].append((place[source], place[i], i))
    out = {role: _placed(graph, deps, [i for *_, i in sorted(nodes)], task_of, recv_ahead) for role, nodes in comm.items()}
    return Positions(task_of, out)


def _placed(
    graph: Graph, deps: Dependencies, nodes: list[int], task_of: dict[int, int], recv_ahead: int
) -> list[tuple[int, int]]:
    wanted: list[int] = []
    latest: list[int] = []
    for i in nodes:
        node = deps.nodes[i]
        if isinstance(node.op, Recv):
            reader = min([task_of[j] for j in deps.after[i] if j in task_of])
            empty = not bind(graph.values[node.writes[0]].spec.nbytes, 1)
            wanted.append(0 if empty else max(0, reader - recv_ahead))
            latest.append(reader)
        else:
            need = max([task_of[j] + 1 for j in deps.before[i] if j in task_of], default=0)
            wanted.append(need)
            latest.append(need if not isinstance(node.op, AllReduce) else 1 << 60)
    bound = 1 << 60
    for k in reversed(range(len(nodes))):
        bound = min(bound, latest[k])
        if isinstance(deps.nodes[nodes[k]].op, Recv):
            wanted[k] = min(wanted[k], bound)
    out, floor = [], 0
    for i, p in zip(nodes, wanted, strict=True):
        floor = max(floor, p)
        out.append((i, floor))
    return out
