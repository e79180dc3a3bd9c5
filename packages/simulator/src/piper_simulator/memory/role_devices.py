"""Find the device of each role, and the memory that a role uses of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piper_ir.plan.plan import Plan, RolePlan
from piper_ir.program.costs import AllocatorCosts
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.cluster.device import Device
from piper_simulator.memory.device_memory import DeviceMemory, device_memory


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

    def memory(self, k: int, nbytes: int) -> DeviceMemory:
        """Return the bytes used on the device when the role holds `nbytes`."""
        return device_memory(
            self.plan, self.plan.roles[self.of[k]], nbytes, self._of(k), self.allocator
        )
