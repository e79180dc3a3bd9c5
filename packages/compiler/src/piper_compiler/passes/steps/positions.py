"""Place communication in each role's program order.

The communication of a role follows the global order of transfers. So the issue orders of all ranks, restricted to
communication, are projections of one order, as NCCL needs (R20-issue-order of `piper_ir.verify`). Within that order:

- a send or a collective comes right after the compute that it needs;
- a receive comes `recv_ahead` compute instructions before its first reader, or as early as possible without bytes;
- neither comes so late that the communication after it would be late.

Copies to the memory of the host and back meet no other rank, so they stand apart from that order: right after the
compute that they need.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_compiler.passes.steps.arrays import NEVER, Ints
from piper_compiler.passes.steps.columns import Columns
from piper_compiler.passes.steps.dependencies import Dependencies
from piper_ir.graph.graph import Graph, Node
from piper_ir.ground.sizes import bind
from piper_ir.program.ops import Collective, Recv


@dataclass(frozen=True)
class Positions:
    """Hold the communication, role by role in issue order.

    Attributes:
        before: `nodes[k]` is issued right before compute instruction `before[k]` of its role.
        counts: how many each role has.
    """

    nodes: Ints
    before: Ints
    counts: Ints


def positions(
    graph: Graph, deps: Dependencies, c: Columns, task: Ints, recv_ahead: int
) -> Positions:
    """Return the positions of all communication of a graph, given the task of each node (`Tasks.number`)."""
    nodes = np.flatnonzero(c.comm)
    receive = c.each(isinstance(n.op, Recv) for n in deps.nodes)[nodes] > 0
    meets = c.place[nodes].copy()
    meets[receive] = c.place[
        c.source[c.first[nodes[receive]]]
    ]  # a receive stands at the place of its send
    order = np.lexsort((c.place[nodes], meets, c.role[nodes]))
    nodes, receive = nodes[order], receive[order]
    early = c.each(_early(graph, deps, recv_ahead))[nodes]
    patient = (
        c.each(isinstance(n.op, Collective) and not _urgent(graph, n, n.op) for n in deps.nodes)[
            nodes
        ]
        > 0
    )

    reader, need = np.full(len(c.of), NEVER), np.full(len(c.of), -1)
    read = c.comm[c.source] & ~c.comm[c.target]
    np.minimum.at(reader, c.source[read], task[c.target[read]])
    np.maximum.at(need, c.target, task[c.source])
    reader, need = reader[nodes], need[nodes] + 1
    wanted = np.where(receive, np.maximum(reader - early, 0), need)
    latest = np.where(receive | patient, reader, need)

    counts = np.bincount(c.role[nodes], minlength=len(graph.roles))
    apart = c.each(_copies(n) for n in deps.nodes)[nodes] > 0
    for run in _slices(counts):
        mine = np.flatnonzero(~apart[run]) + run.start
        bound = np.minimum.accumulate(latest[mine][::-1])[::-1]
        asked = np.where(receive[mine], np.minimum(wanted[mine], bound), wanted[mine])
        wanted[mine] = np.maximum.accumulate(asked)
    if apart.any():
        order = np.lexsort((np.arange(len(nodes)), wanted, c.role[nodes]))
        nodes, wanted = nodes[order], wanted[order]
    return Positions(nodes, wanted, counts)


def _copies(node: Node) -> bool:
    """Return whether a node copies to the memory of the host or back."""
    return isinstance(node.op, Collective) and node.op.law.route == "host"


def _urgent(graph: Graph, node: Node, op: Collective) -> bool:
    """Return whether compute soon needs the result of a collective, unlike a reduction for the end of the step."""
    return op.law.state == "param" or (
        bool(node.writes) and (not op.law.in_place or graph.channels[op.channel].purpose == "terms")
    )


def _slices(counts: Ints) -> list[slice]:
    ends = np.cumsum(counts).tolist()
    return [slice(end - n, end) for end, n in zip(ends, counts.tolist(), strict=True) if n]


def _early(graph: Graph, deps: Dependencies, recv_ahead: int) -> list[int]:
    """Return for each of `deps.nodes` how many compute instructions before its reader it comes: 0 unless a receive."""
    ahead = [0] * len(deps.nodes)
    for k, node in enumerate(deps.nodes):
        if isinstance(node.op, Recv):
            ahead[k] = recv_ahead if bind(graph.values[node.writes[0]].spec.nbytes, 1) else NEVER
    return ahead
