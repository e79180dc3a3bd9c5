"""Time a plan's steps, with contention or without, for all explanations and reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from piper_ir.fold import steady_state, timing
from piper_ir.fold.timing import Prepared, Times
from piper_ir.plan.plan import Plan
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.contention.flows import named_sms, wiring
from piper_simulator.contention.loads import SharedFlows, all_loads
from piper_simulator.durations.cost_model import Work, given_only
from piper_simulator.times import engine


@dataclass(frozen=True, slots=True)
class Timed:
    """Hold times in seconds, of a step alone and of the last of several.

    Attributes:
        first: times of the step alone.
        last: times of the last of several.
        durations: duration of each node in the step alone.
        period_s: seconds per step in steady state.
        slowed_s: how much longer compute took than alone, on the role where that was most; None without contention.
    """

    first: Times
    last: Times
    durations: Sequence[float]
    period_s: float
    slowed_s: float | None


def contention_applies(plan: Plan, cluster: Cluster | None) -> bool:
    """Return whether contention counts.

    It does not if all durations are given or there is no cluster, and on a CPU the cost model has counted it already.
    """
    return cluster is not None and not cluster.synchronous and not given_only(plan)


def shared_flows(
    plan: Plan,
    cluster: Cluster | None,
    prepared: Prepared,
    work: Sequence[Work],
    *,
    contention: bool = True,
) -> SharedFlows | None:
    """Return the loads of messages; None if contention does not count, or no message slows anything down.

    `work` is per node. It raises the errors of `piper_simulator.contention.flows.message_flows`; a stream that takes
    more SMs than a device has is one without `contention`, too.
    """
    if cluster is None or not contention_applies(plan, cluster):
        return None
    if not contention:
        named_sms(plan, cluster)
        return None
    found = all_loads(plan, prepared, work, wiring(cluster))
    return found if found.slow_anything else None


def step_alone(
    prepared: Prepared,
    work: Sequence[Work],
    flows: SharedFlows | None,
    *,
    latency: float,
    issue: float,
) -> Times:
    """Return the times of one step from a common start, given `flows` of `shared_flows`; without them by the sweep."""
    durations = _alone(prepared, work, flows)
    if flows is None:
        return timing.sweep(prepared, durations, latency=latency, issue=issue)
    return _run(prepared, durations, flows, latency=latency, issue=issue)[0]


def time_steps(
    prepared: Prepared,
    work: Sequence[Work],
    flows: SharedFlows | None,
    *,
    latency: float,
    issue: float,
    steps: int = 1,
) -> Timed:
    """Return the times of several steps and of a step alone, and the period under contention.

    A step is run alone, too, because a next step would slow down its end. `flows` are as in `shared_flows`; the rest is
    as in `run_engine`.
    """
    durations = _alone(prepared, work, flows)
    if flows is None:
        times = engine.run_engine(prepared, durations, latency=latency, issue=issue, steps=steps)
        period_s = steady_state.period(prepared, durations, latency=latency, issue=issue)
        return Timed(times[0], times[-1], durations, period_s, None)
    first = step_alone(prepared, work, flows, latency=latency, issue=issue)
    last = (
        _run(prepared, durations, flows, latency=latency, issue=issue, steps=steps)[-1]
        if steps > 1
        else first
    )
    lasted = [end - start for start, end in zip(first.start, first.end, strict=True)]
    slowed = [
        sum(lasted[node] - durations[node] for node in range(a, b) if prepared.group_of[node] < 0)
        for a, b in pairwise(prepared.offsets)
    ]
    period_s = engine.period(
        prepared, durations, flows.messages, latency=latency, issue=issue, inside=flows.inside
    )
    return Timed(first, last, lasted, period_s, max(0.0, *slowed))


def _run(
    prepared: Prepared,
    durations: Sequence[float],
    flows: SharedFlows,
    *,
    latency: float,
    issue: float,
    steps: int = 1,
) -> list[Times]:
    loads, inside = flows.messages, flows.inside
    return engine.run_engine(
        prepared, durations, latency=latency, issue=issue, steps=steps, flows=loads, inside=inside
    )


def _alone(prepared: Prepared, work: Sequence[Work], flows: SharedFlows | None) -> list[float]:
    """Return the uncontended duration per node, which for messages limited to few SMs is that of their flow."""
    durations = [w.seconds for w in work]
    for members, flow in zip(prepared.groups, flows.messages if flows is not None else ()):
        durations[members[0]] = flow.seconds
    return durations
