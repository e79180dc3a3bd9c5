"""Time a plan's steps, with contention or without, for all explanations and reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from piper_ir.fold import steady_state
from piper_ir.fold.issue import Issue, issue_times
from piper_ir.fold.timing import Prepared, Times, prepare, sweep
from piper_ir.plan.plan import Plan
from piper_ir.program.costs import Costs
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.contention.flows import named_sms, wiring
from piper_simulator.contention.loads import SharedFlows, all_loads
from piper_simulator.durations.checked import model_for
from piper_simulator.durations.cost_model import (
    CostModel,
    CostModelFactory,
    Work,
    given_only,
    work_of,
)
from piper_simulator.times.engine import run_steps, step_and_period
from piper_simulator.times.step_work import StepWork


@dataclass(frozen=True, slots=True)
class PlanWork:
    """Hold the work of a plan's instructions, from which their durations follow.

    Attributes:
        prepared: the nodes of the plan, one per instruction, and their waits.
        work: by node, its work if nothing runs beside it.
        flows: the loads of messages, as `shared_flows` gives them.
        latency: seconds between devices, of a synthetic plan.
        issue_s: host seconds per instruction, before its kernels are launched.
        notes: of the cost model.
    """

    prepared: Prepared
    work: Sequence[Work]
    flows: SharedFlows | None
    latency: float
    issue_s: float
    notes: tuple[str, ...] = ()

    @property
    def issue(self) -> Issue | None:
        """Return when hosts issue; None if they take no time."""
        return issue_of(self.prepared, self.issue_s, self.work)


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
    flows = all_loads(plan, prepared, work, wiring(cluster))
    return flows if flows.slow_anything else None


def durations_of(
    plan: Plan,
    cluster: Cluster | None,
    costs: Costs | None,
    model: CostModelFactory,
    *,
    contention: bool,
) -> PlanWork:
    """Return the durations that a cost model gives the instructions of a plan.

    It raises the errors of `piper_simulator.durations.checked.model_for` and of `shared_flows`.
    """
    costing = model_for(plan, cluster, costs, model)
    prepared, work = prepare(plan), work_of(costing, plan)
    flows = shared_flows(plan, cluster, prepared, work, contention=contention)
    return PlanWork(prepared, work, flows, plan.hop, costing.issue_s, costing.notes)


def step_and_period_alone(prepared: Prepared, model: CostModel, plan: Plan) -> tuple[float, float]:
    """Return the seconds of a step alone and the period, by the sweep, without contention."""
    work = work_of(model, plan)
    durations, issue = [w.seconds for w in work], issue_of(prepared, model.issue_s, work)
    return steady_state.step_and_period(prepared, durations, latency=plan.hop, issue=issue)


def issue_of(prepared: Prepared, issue_s: float, work: Sequence[Work]) -> Issue | None:
    """Return when hosts issue instructions of some work, and launch their kernels; None if that takes no time."""
    launches, durations = [w.launch_s for w in work], [w.seconds for w in work]
    return issue_times(prepared.offsets, issue_s, launches, durations)


def step_alone(taken: PlanWork) -> Times:
    """Return the times of one step from a common start, without shared flows by the sweep."""
    if taken.flows is None:
        seconds = _alone(taken)
        return sweep(taken.prepared, seconds, latency=taken.latency, issue=taken.issue)
    return run_steps(_step_work(taken))[0]


def time_steps(taken: PlanWork, steps: int = 1) -> Timed:
    """Return the times of several steps and of a step alone, and the period under contention.

    A step is run alone, too, because a next step would slow down its end.
    """
    work = _step_work(taken)
    prepared, durations = taken.prepared, work.durations
    if taken.flows is None:
        times = run_steps(work, steps)
        period_s = steady_state.period(prepared, durations, latency=taken.latency, issue=work.issue)
        return Timed(times[0], times[-1], durations, period_s, None)
    first, period_s = step_and_period(work)
    last = run_steps(work, steps)[-1] if steps > 1 else first
    lasted = [end - start for start, end in zip(first.start, first.end, strict=True)]
    slowed = [
        sum(lasted[node] - durations[node] for node in range(a, b) if prepared.group_of[node] < 0)
        for a, b in pairwise(prepared.offsets)
    ]
    return Timed(first, last, lasted, period_s, max(0.0, *slowed))


def launches_matter(taken: PlanWork, period_s: float, share: float) -> bool:
    """Return whether launching kernels takes a host more than a share of a period."""
    issue = taken.issue
    return (
        issue is not None
        and any(w.launch_s for w in taken.work)
        and max(issue.step_s) > share * period_s
    )


def period_with_launches(taken: PlanWork, factor: float) -> float:
    """Return the period if each launch of a kernel took its time times a factor."""
    work = [replace(w, launch_s=factor * w.launch_s) for w in taken.work]
    return time_steps(replace(taken, work=work)).period_s


def _step_work(taken: PlanWork) -> StepWork:
    flows = taken.flows
    messages, inside = (None, None) if flows is None else (flows.messages, flows.inside)
    return StepWork(taken.prepared, _alone(taken), taken.latency, taken.issue, messages, inside)


def _alone(taken: PlanWork) -> list[float]:
    """Return the uncontended duration per node, which for messages limited to few SMs is that of their flow."""
    durations = [w.seconds for w in taken.work]
    flows = taken.flows.messages if taken.flows is not None else ()
    for members, flow in zip(taken.prepared.groups, flows):
        durations[members[0]] = flow.seconds
    return durations
