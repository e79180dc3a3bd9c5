"""The event engine equals the timing sweep, on random plans with ties, latency, host and steps. They share the DAG
only."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from piper_ir.fold.timing import prepare, sweep
from piper_simulator.times.engine import run_engine
from tests.helpers.cases import each_case
from tests.helpers.random_plans import PlanBuilder, random_plan


@given(
    seed=st.integers(0, 1 << 30), issue=st.sampled_from([0.0, 0.13, 1.0]), steps=st.integers(1, 3)
)
def test_the_engine_equals_the_sweep_exactly(seed: int, issue: float, steps: int) -> None:
    plan, durations = random_plan(seed)
    prepared = prepare(plan)
    found = run_engine(prepared, durations, latency=plan.hop, issue=issue, steps=steps)
    before = None
    for times in found:
        before = sweep(prepared, durations, latency=plan.hop, issue=issue, after=before)
        assert times == before
    assert len(found) == steps


@each_case("what", ["latency", "issue", "duration"])
def test_negative_control_the_comparison_sees_a_difference(what: str) -> None:
    build = PlanBuilder(2, hop=1.0)
    build.compute(0, 1.0)
    build.transfer(0, 1, waits=(("compute", 1),))
    build.compute(1, 1.0, waits=(("0>1", 1),))
    prepared, durations = prepare(build.plan()), [1.0, 0.5, 0.5, 1.0]
    assert run_engine(prepared, durations, latency=1.0) == [sweep(prepared, durations, latency=1.0)]
    other = {
        "latency": sweep(prepared, durations, latency=1.0 + 1e-9),
        "issue": sweep(prepared, durations, latency=1.0, issue=1e-9),
        "duration": sweep(prepared, [1.0, 0.5, 0.5, 1.0 + 1e-9], latency=1.0),
    }
    assert run_engine(prepared, durations, latency=1.0) != [other[what]]


def test_the_result_does_not_depend_on_the_order_of_roles() -> None:
    """Nor on anything else that only decides which of two events of one moment comes first."""
    for seed in range(50):
        plan, durations = random_plan(seed)
        turned = replace(plan, roles=plan.roles[::-1])
        ends = [len(r.program) for r in plan.roles]
        first = [sum(ends[:r]) for r in range(len(ends))]
        pieces = [durations[f : f + n] for f, n in zip(first, ends)]
        (times,) = run_engine(prepare(plan), durations, latency=plan.hop, issue=0.1)
        (other,) = run_engine(
            prepare(turned),
            [d for piece in pieces[::-1] for d in piece],
            latency=plan.hop,
            issue=0.1,
        )
        starts = [times.start[f : f + n] for f, n in zip(first, ends)]
        assert other.start == [t for piece in starts[::-1] for t in piece]


def test_a_stream_may_run_a_step_ahead() -> None:
    """The first device needs 1 s per step, the second 4 s: without a barrier the first is three steps ahead after a
    while."""
    build = PlanBuilder(2)
    build.compute(0, 1.0)
    build.transfer(0, 1, waits=(("compute", 1),))
    build.compute(1, 4.0, waits=(("0>1", 1),))
    plan = build.plan()
    found = run_engine(prepare(plan), [1.0, 0.0, 0.0, 4.0], steps=4)
    assert [t.start[0] for t in found] == [0.0, 1.0, 2.0, 3.0]
    assert [t.start[3] for t in found] == [1.0, 5.0, 9.0, 13.0]
