"""The times of a plan's steps, with contention or without: what everything that explains or reports a simulation rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from piper_ir import steady_state, timing
from piper_ir.plan import Plan
from piper_ir.timing import Prepared, Times
from piper_simulator import contention, engine
from piper_simulator.cluster import Cluster
from piper_simulator.cost_model import Work, given_only
from piper_simulator.rates import Flow


@dataclass(frozen=True, slots=True)
class Timed:
    """Times in seconds, of a step alone and of the last of several. `durations`: per node, as long as it took in the step alone.
    `period_s`: per step in steady state. `slowed_s`: how much longer compute took than alone, on the role where that was most;
    None without contention."""

    first: Times
    last: Times
    durations: Sequence[float]
    period_s: float
    slowed_s: float | None


def contention_applies(plan: Plan, cluster: Cluster | None) -> bool:
    """Whether contention counts: nothing is shared where all durations are given or there is no cluster, and on a CPU the cost
    model has counted it already."""
    return cluster is not None and not cluster.synchronous and not given_only(plan)


def shared_flows(plan: Plan, cluster: Cluster | None, prepared: Prepared, work: Sequence[Work]) -> list[Flow] | None:
    """Return what messages ask for; None where contention does not count, or no message slows anything down. `work`: per node.
    Errors: `piper_simulator.contention.flows`."""
    if cluster is None or not contention_applies(plan, cluster):
        return None
    found = contention.flows(plan, prepared, work, contention.wiring(cluster))
    return found if contention.slows_anything(found) else None


def step_alone(prepared: Prepared, work: Sequence[Work], flows: Sequence[Flow] | None, *, latency: float, issue: float) -> Times:
    """Times of one step from a common start. `flows`: see `shared_flows`; without them by the sweep, which the engine equals."""
    durations = _alone(prepared, work, flows)
    if flows is None:
        return timing.sweep(prepared, durations, latency=latency, issue=issue)
    return engine.run(prepared, durations, latency=latency, issue=issue, flows=flows)[0]


def time_steps(
    prepared: Prepared, work: Sequence[Work], flows: Sequence[Flow] | None, *, latency: float, issue: float, steps: int = 1
) -> Timed:
    """Run the engine: for the steps, for the period under contention, and then also for a step alone, whose end a next one would
    slow down. `flows`: see `shared_flows`; the rest as in `engine.run`."""
    durations = _alone(prepared, work, flows)
    if flows is None:
        times = engine.run(prepared, durations, latency=latency, issue=issue, steps=steps)
        period_s = steady_state.period(prepared, durations, latency=latency, issue=issue)
        return Timed(times[0], times[-1], durations, period_s, None)
    first = step_alone(prepared, work, flows, latency=latency, issue=issue)
    last = engine.run(prepared, durations, latency=latency, issue=issue, flows=flows, steps=steps)[-1] if steps > 1 else first
    lasted = [end - start for start, end in zip(first.start, first.end, strict=True)]
    slowed = [
        sum(lasted[node] - durations[node] for node in range(a, b) if prepared.group_of[node] < 0)
        for a, b in pairwise(prepared.offsets)
    ]
    period_s = engine.period(prepared, durations, flows, latency=latency, issue=issue)
    return Timed(first, last, lasted, period_s, max(0.0, *slowed))


def _alone(prepared: Prepared, work: Sequence[Work], flows: Sequence[Flow] | None) -> list[float]:
    """Per node the duration that the engine wants: a message on few SMs takes longer also where nothing is beside it."""
    durations = [w.seconds for w in work]
    for members, flow in zip(prepared.groups, flows or ()):
        durations[members[0]] = flow.seconds
    return durations
