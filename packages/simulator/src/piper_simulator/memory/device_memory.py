"""What is gone on a device beside the tensors of a plan: what torch's allocator reserves, the context, communicators."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ir.costs import AllocatorCosts
from piper_ir.plan import DeviceType, Plan, RolePlan
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.cluster.device import Device

MIB = 1 << 20
NCCL_CHANNELS = 32
"""At most so many (NCCL: MAXCHANNELS, src/include/device.h, until 2.18; later versions may have more and use no more between GPUs
of a node)."""
NCCL_SIMPLE = 4 * MIB
NCCL_LL = 8 * 512 * 8 * 16
NCCL_LL128 = 120 * 640 * 8 * 8
"""Bytes of a connection's buffer by protocol (NCCL: src/init.cc, DEFAULT_BUFFSIZE; DEFAULT_LL_BUFFSIZE: lines per thread,
threads, steps, bytes of a line; DEFAULT_LL128_BUFFSIZE: elements per thread, threads, steps, bytes of an element)."""
RECEIVED = 4
"""Connections of a channel from which a rank receives: one of the ring, and of its tree the parent and two children."""


def communicator_bytes(channels: int = NCCL_CHANNELS, received: int = RECEIVED) -> int:
    """Buffers of a communicator of several ranks, by NCCL's defaults: each connection has one for each protocol where it
    receives. `Device.group_bytes` of the built-in devices is what was measured instead: 1.27 GiB on an A100; this is 1.15."""
    return channels * received * (NCCL_SIMPLE + NCCL_LL + NCCL_LL128)


def pair_bytes(channels: int = NCCL_CHANNELS) -> int:
    """Buffers of a communicator of two ranks on which one broadcasts to the other (`piper_runtime.nccl`): a ring alone. Not
    measured."""
    return communicator_bytes(channels, 1)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes at the peak of a role. `allocated`: tensors and what kernels hold inside, as torch's `max_memory_requested`;
    `reserve`: what the allocator takes from the device beyond, rounding and unused blocks; `context`: of CUDA, with its kernels;
    `groups`, `pairs`: communicators of groups and of neighbours, which a profile does not see: it makes them last, and others."""

    allocated: int
    reserve: int = 0
    context: int = 0
    groups: int = 0
    pairs: int = 0

    @property
    def total(self) -> int:
        return self.allocated + self.reserve + self.context + self.groups + self.pairs


def device_type(cluster: Cluster | None) -> DeviceType:
    """Whose kernels run on a cluster, as `Plan.device`: those of a CPU hold next to nothing inside."""
    return "" if cluster is None or cluster.synchronous else "cuda"


def device_memory(
    plan: Plan, role: RolePlan, peak: int, device: Device | None, allocator: AllocatorCosts | None = None
) -> DeviceMemory:
    """What is gone on a device when the plan holds `peak` bytes: a communicator per channel of the role (of more than one rank).
    `allocator`: as measured, in place of the cluster's factor and context. The plan's own bytes when neither is given."""
    if allocator is not None:
        factor, context = allocator.factor, allocator.context_bytes
    elif device is not None:
        factor, context = device.allocator_factor, device.context_bytes
    else:
        return DeviceMemory(peak)
    mine = [c for c in plan.channels if role.role in c.roles]
    pairs = sum(c.kind == "p2p" for c in mine)
    groups = sum(c.kind == "group" and len(plan.peers(c, role.ranks[0])) > 1 for c in mine)
    each = (device.group_bytes, device.p2p_bytes) if device is not None else (0, 0)
    return DeviceMemory(peak, round(peak * factor) - peak, context, groups * each[0], pairs * each[1])
