"""Say which work devices that share chunks each do whole, if that costs much of a step, or very large tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import Plan
from piper_ir.program.program import Cost, Step
from piper_ir.tools import size_text, time_text
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.cluster.device import Device
from piper_simulator.durations.kernels import kernel_seconds
from piper_simulator.metrics import step_runs

MOST_SHARE = 0.05
"""The share of a step that sharing may save before a note says so."""
MOST_MEMORY = 1 / 8
"""The share of a device's memory that a kernel which every device runs whole may move before a note says so."""
COPIES = frozenset({"clone"})
"""The operators that lay out tensors gathered from other devices, which is a cost of the exchange."""
MOST_NAMED = 4
"""The number of operators that a note names one by one."""


@dataclass
class _Whole:
    """Hold the cost of operators that are not shared.

    Attributes:
        saved_s: operator -> seconds of a step that sharing it would save.
        most_bytes: operator -> bytes that one of its kernels reads and writes, the largest.
    """

    saved_s: dict[str, float] = field(default_factory=dict)
    most_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return sum(self.saved_s.values())

    def add(self, other: _Whole, times: int) -> None:
        """Count the cost of `other`, so many times."""
        for op, seconds in other.saved_s.items():
            self.saved_s[op] = self.saved_s.get(op, 0.0) + times * seconds
            self.most_bytes[op] = max(self.most_bytes.get(op, 0), other.most_bytes[op])


def whole_notes(plan: Plan, target: Cluster | None, step_s: float) -> list[str]:
    """Return a warning about operators that devices which share chunks do not share; none if these cost little.

    Seconds are by formula, whatever costs were measured, on the first kind of device. The role that would save most
    counts, beside the seconds of the step.
    """
    if target is None or plan.mesh.degree(plan.shared) < 2 or not step_s:
        return []
    most = max(_by_role(plan, target.device), key=lambda whole: whole.total_s, default=_Whole())
    bound = MOST_MEMORY * target.device.memory_bytes
    large = {op: nbytes for op, nbytes in most.most_bytes.items() if nbytes > bound}
    slow = most.total_s > MOST_SHARE * step_s
    if not slow and not large:
        return []
    ops = sorted(most.saved_s if slow else large, key=lambda op: (-most.saved_s[op], op))
    named = sorted(
        ops[:MOST_NAMED] + [op for op in large if op not in ops[:MOST_NAMED]], key=ops.index
    )
    more = f" and {len(ops) - len(named)} more" if len(ops) > len(named) else ""
    along = " and ".join(f"{axis}={plan.mesh.size(axis)}" for axis in plan.shared)
    return [
        f"`shard` leaves operators whole, which each of the devices along {along} computes: sharing them would "
        f"save {time_text(most.total_s)} of the step ({most.total_s / step_s:.1%}): "
        f"{', '.join(_cost(op, most.saved_s[op] / step_s, large) for op in named)}{more}. `piper explain` says why"
    ]


def _cost(op: str, share: float, large: Mapping[str, int]) -> str:
    return f"{op} ({share:.1%}{f', {size_text(large[op])} read and written at once' if op in large else ''})"


def _by_role(plan: Plan, device: Device) -> list[_Whole]:
    """Return for each role the operators that it computes whole in a step."""
    degree, whole_by_key, by_role = (
        plan.mesh.degree(plan.shared),
        dict[tuple[int, Step], _Whole](),
        [],
    )
    for role in plan.roles:
        runs = step_runs(role.table)
        by_role.append(whole := _Whole())
        for (variant, step), times in runs.items():
            cost = plan.chunk(variant).steps[step].cost
            key = id(cost), step  # the plan keeps it; equal layers share it
            if key not in whole_by_key:
                whole_by_key[key] = _of_cost(cost, step, degree, plan.rows, device)
            whole.add(whole_by_key[key], times)
    return by_role


def _of_cost(cost: Cost, step: Step, degree: int, rows: int, device: Device) -> _Whole:
    """Return the cost of the kernels of a step that are shared among fewer devices than `degree`."""
    whole = _Whole()
    for kernel in (k for k in cost.kernels if k.shared < degree and k.op not in COPIES):
        name, took = (
            kernel.op or kernel.kind,
            kernel_seconds(device, kernel, step),
        )
        saved_s = took.seconds * (1 - kernel.shared / degree)
        whole.add(_Whole({name: saved_s}, {name: bind(kernel.bytes, rows)}), kernel.count)
    return whole
