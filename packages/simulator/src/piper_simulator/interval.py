"""Say how far a predicted step may be from a measured one: the interval in which 80 % of published runs should fall.

Its width is `Stack.seen` of a stack whose constants are of the cluster's devices, else UNSEEN: estimates from residuals
of published runs. A step that waits for its host is less certain, because the time of a launch differs between models
by more than that of a product: there the interval also holds the steps with slower and quicker launches. `piper
simulate`, `tune`, `plan`, `accuracy` and reports show this interval, and `piper accuracy` how many runs are inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from piper_ir.plan.plan import Plan
from piper_ir.program.program import Program
from piper_ir.tools import time_text
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.cluster.stacks import holds_for, stacks_of
from piper_simulator.durations.cost_model import given_only
from piper_simulator.times.timed import PlanWork, launches_matter, period_with_launches

UNSEEN = 0.45
"""The share by which a step may be longer than predicted without a stack that has constants."""
LAUNCHES = 0.65
"""The share by which launches may take longer than a stack says.

The steps of 99 of Megatron-LM's functional tests on H100, most of which wait for the host, are within a factor of 1.67
in four cases of five (`tests/interop/megatron_steps.py`, 30 November 2026).
"""
HOST_SHARE = 0.5
"""The share of a period that hosts take at least for their launches to count: with less a device rarely waits."""


@dataclass(frozen=True, slots=True)
class RunsInterval:
    """Hold an interval of a step's seconds.

    Attributes:
        low: its lower end.
        high: its upper end.
        stack: name of the stack whose runs decide the width; "" for none.
    """

    low: float
    high: float
    stack: str = ""

    @property
    def range_text(self) -> str:
        """Return both ends, and whose runs they are of."""
        return f"{time_text(self.low)} to {time_text(self.high)}"


def interval_of(
    plan: Plan, cluster: Cluster | None, taken: PlanWork, period_s: float
) -> RunsInterval | None:
    """Return the interval of a predicted period; None where times are given or measured on this machine.

    `taken` is the work of the plan's instructions on this cluster.
    """
    if cluster is None or cluster.synchronous or given_only(plan):
        return None
    own = step_interval(period_s, cluster)
    if not own.stack or not launches_matter(taken, period_s, HOST_SHARE):
        return own  # without a stack the width holds any launches
    slow = period_with_launches(taken, 1 + LAUNCHES)
    quick = period_with_launches(taken, 1 / (1 + LAUNCHES))
    up = math.hypot(math.log(own.high / period_s), math.log(max(1.0, slow / period_s)))
    down = math.hypot(math.log(period_s / own.low), math.log(max(1.0, period_s / quick)))
    return replace(own, low=period_s * math.exp(-down), high=period_s * math.exp(up))


def interval_share(program: Program, cluster: Cluster | None) -> tuple[float, str]:
    """Return the share by which a step may be longer than predicted, and whose runs say so; 0 without an interval."""
    if cluster is None or cluster.synchronous or given_only(program):
        return 0.0, ""
    one = step_interval(1.0, cluster)
    return one.high - 1, one.stack


def step_interval(step_s: float, cluster: Cluster) -> RunsInterval:
    """Return the interval of a predicted step on a cluster."""
    stack = cluster.device.stack
    known = stack is not None and stack.seen > 0 and not _elsewhere(cluster)
    width = stack.seen if stack is not None and known else UNSEEN
    name = stack.name if stack is not None and known else ""
    return RunsInterval(step_s / (1 + width), step_s * (1 + width), name)


def _elsewhere(cluster: Cluster) -> tuple[str, ...]:
    """Return the devices of a cluster that the constants of its stack are not of."""
    stack = cluster.device.stack
    names = dict.fromkeys(kind.device.name for kind in cluster.kinds)
    return tuple(n for n in names if stack is not None and not holds_for(stack, n))


def stack_advice(plan: Plan, cluster: Cluster | None) -> tuple[str, ...]:
    """Return a warning for a cluster without constants of a stack for its devices, with the names that there are."""
    if cluster is None or given_only(plan):
        return ()
    stack = cluster.device.stack
    if stack is not None and (others := _elsewhere(cluster)):
        there = ", ".join(stacks_of(others[0])) or "none"
        return (
            f"{cluster.name}: the constants of {stack.name} hold for {', '.join(stack.devices)} and not for "
            f"{', '.join(others)}, so that the interval is as wide as without a stack; stacks of {others[0]}: {there}",
        )
    here = stacks_of(cluster.device.name)
    if cluster.synchronous or not here or (stack is not None and stack.constants):
        return ()
    return (
        f"{cluster.name}: no software stack with constants is named, and predictions are for published best kernels; "
        f"stacks of this device are {', '.join(here)} (as in {cluster.device.name}:8@{here[0]})",
    )
