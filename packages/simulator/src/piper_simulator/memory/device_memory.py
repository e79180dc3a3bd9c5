"""Count the device memory beside the plan's tensors: the allocator's reserve, the context, and communicators."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ir.plan.plan import Channel, DeviceType, Plan, RolePlan
from piper_ir.program.costs import AllocatorCosts
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.cluster.device import Device


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Count the bytes on a device at the peak of a role.

    Attributes:
        allocated: tensors and the workspace of kernels, as torch's `max_memory_requested`.
        reserve: the bytes that the allocator takes from the device beyond, for rounding and unused blocks.
        context: memory of CUDA, with its kernels.
        groups: communicators of groups, which a profile does not see: it makes them last, and others.
        pairs: communicators of neighbours, which a profile does not see either.
        buffers: memory that a software stack holds beside the plan's tensors, as torch's allocator sees them, too.
    """

    allocated: int
    reserve: int = 0
    context: int = 0
    groups: int = 0
    pairs: int = 0
    buffers: int = 0

    @property
    def held(self) -> int:
        """Return the bytes that torch's allocator counts as allocated."""
        return self.allocated + self.buffers

    @property
    def reserved(self) -> int:
        """Return the bytes that torch's allocator takes from the device."""
        return self.held + self.reserve

    @property
    def total(self) -> int:
        return self.reserved + self.context + self.groups + self.pairs


def device_type(cluster: Cluster | None) -> DeviceType:
    """Return the kind of device of a cluster, as `Plan.device`; kernels of a CPU hold next to nothing inside."""
    return "" if cluster is None or cluster.synchronous else "cuda"


def device_memory(
    plan: Plan,
    role: RolePlan,
    peak: int,
    device: Device | None,
    allocator: AllocatorCosts | None = None,
    buffers: int = 0,
) -> DeviceMemory:
    """Return the bytes used on a device when the plan holds `peak` bytes, and its software `buffers` beside them.

    There is a communicator per channel of the role (of more than one rank). `allocator` is as measured, in place of the
    device's factor and context. The result is the plan's own bytes when neither is given.
    """
    if allocator is not None:
        factor, context = allocator.factor, allocator.context_bytes
    elif device is not None:
        factor, context = device.allocator_factor, device.context_bytes
        if device.stack is not None and device.stack.reserved:
            factor = device.stack.reserved
    else:
        return DeviceMemory(peak)
    mine = [c for c in plan.channels if role.role in c.roles]
    pairs = sum(c.kind == "p2p" for c in mine)
    groups = sum(c.kind == "group" and _has_others(plan, c, role) for c in mine)
    each = (device.group_bytes, device.p2p_bytes) if device is not None else (0, 0)
    held = peak + buffers
    reserve = round(held * factor) - held
    return DeviceMemory(peak, reserve, context, groups * each[0], pairs * each[1], buffers)


def _has_others(plan: Plan, channel: Channel, role: RolePlan) -> bool:
    """Return whether the ranks of a role meet others on a channel."""
    along = [axis for axis in channel.over if axis not in role.placed]
    return len(channel.roles) > 1 or plan.mesh.degree(along) > 1
