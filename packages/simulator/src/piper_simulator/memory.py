"""The memory curve of a run: the plan's bytes by category at the times of the run, and what a device holds beside tensors.

Only the stream "compute" allocates and frees, and it runs in program order: the peak in program order is the peak in time.
"""

from __future__ import annotations

from collections.abc import Sequence

from piper_ir.memory import Usage
from piper_ir.plan import Plan, RolePlan
from piper_ir.trace import MemSample
from piper_simulator.clusters import Cluster


def curve(rank: int, usages: Sequence[Usage], starts: Sequence[float]) -> list[MemSample]:
    """One sample per compute instruction, at its start; `starts`: seconds, of each instruction of the role."""
    return [MemSample(rank, u.instr, starts[u.instr], u.bytes) for u in usages]


def device_bytes(plan: Plan, role: RolePlan, peak: int, cluster: Cluster | None) -> int:
    """Bytes gone on a device at the peak: reserved by the allocator, the context, and a communicator per channel of its role
    (of more than one rank). The plan's own bytes when no cluster is given."""
    if cluster is None:
        return peak
    total = cluster.context_bytes + round(peak * cluster.allocator_factor)
    for channel in plan.channels:
        if role.role not in channel.roles:
            continue
        if channel.kind == "p2p":
            total += cluster.p2p_bytes
        elif len(plan.peers(channel, role.ranks[0])) > 1:
            total += cluster.group_bytes
    return total
