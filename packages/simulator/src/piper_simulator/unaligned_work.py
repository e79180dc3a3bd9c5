"""Warn of products that are slow since numbers of features are no multiples of 8, and say how much padding saves."""

from __future__ import annotations

from piper_ir.plan.plan import Plan
from piper_ir.tools import time_text
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.durations.alignment import ALIGNED, aligned_part, unaligned_features
from piper_simulator.durations.kernels import kernel_seconds
from piper_simulator.metrics import step_runs

MOST_SHARE = 0.03
"""The share of a step that padding may save before a note says so."""


def unaligned_notes(plan: Plan, target: Cluster | None, step_s: float) -> list[str]:
    """Return a warning about products with unaligned rows; none if padding them would save little.

    Seconds are by formula, on the first kind of device. The role that would save most counts.
    """
    if target is None or target.device.stack is None or not step_s:
        return []
    most, features = 0.0, set[int]()
    for role in plan.roles:
        saved, seen = 0.0, set[int]()
        for (variant, step), times in step_runs(role.table).items():
            for kernel in plan.chunk(variant).steps[step].cost.kernels:
                if found := unaligned_features(kernel, step):
                    took = kernel_seconds(target.device, kernel, step).seconds * kernel.count
                    saved += times * took * (1 - aligned_part(target.device, kernel, step))
                    seen |= set(found)
        if saved > most:
            most, features = saved, seen
    if most < MOST_SHARE * step_s:
        return []
    numbers = ", ".join(str(n) for n in sorted(features)[:3])
    return [
        f"products with {numbers} features are slow, as {ALIGNED} elements of 16 bit are loaded at once: multiples of "
        f"{ALIGNED} on each device (a padded vocabulary, another width) would save about {time_text(most)} of the step "
        f"({most / step_s:.0%})"
    ]
