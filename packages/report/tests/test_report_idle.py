"""Idle time read from spans means what the simulator means by it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.report.tests import samples
from piper_ir.ground.intervals import uncovered
from piper_ir.ground.trace import Span, Trace
from piper_ir.plan.plan import Plan
from piper_report.facts.idle import idle_ranks, makespan
from piper_simulator import simulate
from tests.helpers.cases import each_case

PLANS = {
    "pipeline": samples.plan_of(pp=3, microbatches=4),
    "data parallel": samples.plan_of(pp=1, dp=4),
    "both": samples.plan(),
}


@each_case("plan", PLANS.values(), ids=PLANS)
def test_of_a_simulated_trace_it_is_what_the_simulator_says(plan: Plan) -> None:
    made = simulate(plan, "h100x8", costs=samples.comm_costs(plan))
    found = idle_ranks(made.trace, plan)
    assert made.exposed_comm_s > 0
    assert max(g.exposed for g in found if g.exposed is not None) == pytest.approx(
        made.exposed_comm_s, rel=1e-9
    )
    assert [g.global_bubble for g in found] == pytest.approx(made.bubble_s, rel=1e-9)
    assert max(g.span_bubble for g in found) == pytest.approx(made.span_bubble_s, rel=1e-9)
    assert makespan(made.trace) == pytest.approx(made.step_s, rel=1e-9)


def test_waiting_for_the_other_side_is_not_communication() -> None:
    """A receive that is posted early is idle time, not exposed communication."""
    plan, trace = samples.plan(), samples.simulation().trace
    early = samples.executed(trace, slower=1.0, early=5e-4)
    assert early.spans != trace.spans
    assert [g.exposed for g in idle_ranks(early, plan)] == pytest.approx(
        [g.exposed for g in idle_ranks(trace, plan)], abs=1e-12
    )


def test_without_a_plan_nobody_knows_what_is_exposed() -> None:
    found = idle_ranks(samples.simulation().trace)
    assert {g.exposed for g in found} == {None} and found[0].busy > 0


def test_of_an_empty_trace_and_of_a_rank_that_only_communicates() -> None:
    assert (
        idle_ranks(Trace("k", "executed", ())) == [] and makespan(Trace("k", "executed", ())) == 0
    )
    (found,) = idle_ranks(Trace("k", "executed", (Span(0, "x", 0, "send", 1.0, 3.0),)))
    assert (found.busy, found.global_bubble, found.span_bubble) == (0, 2.0, 0)


INTERVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda p: (min(p), max(p))), max_size=8
)


@given(INTERVALS, INTERVALS)
def test_uncovered_counts_each_moment_once(
    intervals: list[tuple[int, int]], busy: list[tuple[int, int]]
) -> None:
    by, reached = [], -1
    for start, end in sorted(busy):
        if start >= reached and end > start:
            by.append((start, end))
            reached = end
    moments = {t for a, b in intervals for t in range(a, b)} - {
        t for a, b in by for t in range(a, b)
    }
    assert uncovered(intervals, by) == len(moments)
