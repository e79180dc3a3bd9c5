"""Say how far a predicted step may be from a measured one: the interval in which 80 % of published runs should fall.

The width is a fact about predictions, not about a plan: `Stack.seen` of a stack whose constants are of the cluster's
devices, else UNSEEN. `piper simulate`, `plan`, `tune`, `accuracy` and reports show this one interval. Both widths are
estimates from the residuals of the rows that were tried; `piper accuracy` prints how many rows are covered.
"""

from __future__ import annotations

from dataclasses import dataclass

from piper_ir.plan.plan import Plan
from piper_ir.program.program import Program
from piper_ir.tools import time_text
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.cluster.stacks import holds_for, stacks_of
from piper_simulator.durations.cost_model import given_only

UNSEEN = 0.45
"""The share by which a step may be longer than predicted without a stack that has constants."""


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
    plan: Plan | Program, cluster: Cluster | None, step_s: float
) -> RunsInterval | None:
    """Return the interval of a predicted step of a plan; None where times are given or measured on this machine."""
    if cluster is None or cluster.synchronous or given_only(plan):
        return None
    return step_interval(step_s, cluster)


def interval_share(program: Program, cluster: Cluster | None) -> tuple[float, str]:
    """Return the share by which a step may be longer than predicted, and whose runs say so; 0 without an interval."""
    one = interval_of(program, cluster, 1.0)
    return (0.0, "") if one is None else (one.high - 1, one.stack)


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
