"""Find the device of each role, and the memory that a role uses of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from piper_ir.fold.memory import RoleMemory, Usage
from piper_ir.fold.memory_steps import PartUses
from piper_ir.plan.plan import Plan, RolePlan
from piper_ir.program.costs import AllocatorCosts, Costs
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.cluster.device import Device
from piper_simulator.memory.device_memory import DeviceMemory, device_memory, device_type
from piper_simulator.memory.software import HeldBeside, fullest_moment
from piper_simulator.times.splitting import SplitPlan


@dataclass(frozen=True, slots=True)
class RoleDevices:
    """Find the device of each of the `split` roles, whose ranks are all on one kind.

    Attributes:
        of: for each of them the number of its role in the plan.
    """

    plan: Plan
    split: Sequence[RolePlan]
    of: Sequence[int]
    cluster: Cluster | None
    allocator: AllocatorCosts | None

    def _of(self, k: int) -> Device | None:
        return None if self.cluster is None else self.cluster.of(self.split[k].ranks[0])

    def limit(self, k: int) -> int | None:
        """Return the bytes that the device of a role has."""
        device = self._of(k)
        return None if device is None else device.memory_bytes

    def memory(self, k: int, nbytes: int, buffers: int = 0) -> DeviceMemory:
        """Return the bytes used on the device when the role holds `nbytes`, and its software `buffers`."""
        return device_memory(
            self.plan, self.plan.roles[self.of[k]], nbytes, self._of(k), self.allocator, buffers
        )


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Hold the memory of a plan's roles at their fullest moments.

    Attributes:
        counted: the plan with memory counted for the cluster's devices.
        peaks: of the roles of the plan.
        walks: the memory of each of these roles through its program.
        beside: the buffers of the software stack beside each of these roles.
        used: of the split roles, on their devices.
    """

    counted: Plan
    peaks: Sequence[Usage]
    walks: Sequence[RoleMemory] = field(compare=False)
    beside: Sequence[HeldBeside] = field(compare=False)
    devices: RoleDevices
    used: Sequence[DeviceMemory]


def peak_memory(
    plan: Plan, split: SplitPlan, cluster: Cluster | None, costs: Costs | None
) -> PeakMemory:
    """Return the peaks of a plan's roles, and the bytes that these use on their devices."""
    allocator = None if costs is None else costs.allocator
    devices = RoleDevices(plan, split.plan.roles, split.of, cluster, allocator)
    counted = plan if cluster is None else replace(plan, device=device_type(cluster))
    stack = None if cluster is None else cluster.device.stack
    beside = [HeldBeside(counted, role, stack) for role in counted.roles]
    uses = PartUses(counted)
    walks = [RoleMemory(counted, role, uses) for role in counted.roles]
    moments = [fullest_moment(*one) for one in zip(walks, beside, strict=True)]
    used = [devices.memory(k, moments[r][0].total, moments[r][1]) for k, r in enumerate(split.of)]
    return PeakMemory(counted, [most for most, _ in moments], walks, beside, devices, used)
