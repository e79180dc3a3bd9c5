"""The event engine equals the timing sweep, on random plans with ties, latency, host and steps; they share the DAG
only. Under contention it equals the engine of SimPy's events to the bit."""

import gc
import weakref
from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from packages.simulator.tests import simpy_engine
from packages.simulator.tests.test_contention_reference import random_demands
from piper_ir.fold.issue import issue_times
from piper_ir.fold.timing import Prepared, prepare, sweep
from piper_simulator.contention.loads import TimedPiece
from piper_simulator.contention.rates import Flow
from piper_simulator.times import engine
from piper_simulator.times.engine import run_engine
from piper_simulator.times.repetition import StepEnds
from piper_simulator.times.step_work import StepWork
from tests.helpers.cases import each_case
from tests.helpers.random_plans import PlanBuilder, random_launches, random_plan


@given(
    seed=st.integers(0, 1 << 30),
    each=st.sampled_from([0.0, 0.13, 1.0]),
    launching=st.booleans(),
    steps=st.integers(1, 3),
)
def test_the_engine_equals_the_sweep_and_the_events_of_simpy_exactly(
    seed: int, each: float, launching: bool, steps: int
) -> None:
    plan, durations = random_plan(seed)
    prepared = prepare(plan)
    launches = random_launches(durations, Random(seed)) if launching else []
    issue = issue_times(prepared.offsets, each, launches, durations)
    found = run_engine(prepared, durations, latency=plan.hop, issue=issue, steps=steps)
    before = None
    for times in found:
        before = sweep(prepared, durations, latency=plan.hop, issue=issue, after=before)
        assert times == before
    assert len(found) == steps
    assert found == simpy_engine.run_engine(
        prepared, durations, latency=plan.hop, issue=each, launches=launches, steps=steps
    )


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
        "issue": sweep(prepared, durations, latency=1.0, issue=issue_times(prepared.offsets, 1e-9)),
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
        (times,), (other,) = (
            run_engine(
                prepared, seconds, latency=plan.hop, issue=issue_times(prepared.offsets, 0.1)
            )
            for prepared, seconds in (
                (prepare(plan), durations),
                (prepare(turned), [d for piece in pieces[::-1] for d in piece]),
            )
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


def pieces_inside(prepared: Prepared, rng: Random, grid: float) -> dict[int, list[TimedPiece]]:
    """Return pieces of most compute: rounds of compute and messages, on links of their own and on those of others."""
    inside = {}
    for r, (first, end) in enumerate(zip(prepared.offsets, prepared.offsets[1:])):
        messages = []
        for _ in range(rng.randint(1, 3)):
            links = rng.sample(range(6), rng.choice((0, 0, 1, 2)))
            one = {x: rng.choice((0.1, 0.3, 0.5, 0.73, 1.0)) for x in links}
            shares = {x: part * rng.choice((1, 1, 2)) for x, part in one.items()}
            seconds = grid or rng.uniform(0.01, 0.3)
            takes = {r: (rng.choice((0.0, 0.15)), rng.choice((0.0, 0.1)))}
            id = max(len(prepared), 3) * (r + 1) + len(messages)  # of one message alone
            messages.append(Flow(id, seconds, shares, max(one.values(), default=0.0), takes))
        compute = grid or rng.uniform(0.1, 1.0)
        pieces = [(compute, None), *((m.seconds, m) for m in messages)] * rng.randint(1, 4)
        for node in range(first, end):
            if prepared.group_of[node] < 0 and rng.random() < 0.8:
                inside[node] = pieces
    return inside


def test_steps_repeat_when_all_that_is_under_way_does() -> None:
    """Two moments of plan 1873 differ only by the message that a running instruction sends: no repetition. Every third
    plan has hosts that are slower than their devices: in plan 228 a host is still ahead though a stream waits for it,
    in plan 1385 one falls behind before a stream waits for it."""
    sooner, hosted = 0, 0
    for seed in (*range(60), 228, 1385, 1873):
        plan, durations = random_plan(seed, most_roles=5, most=25)
        prepared, rng = prepare(plan), Random(seed)
        grid = 0.25 if seed == 1873 else 0.0
        durations = [round(d / grid) * grid for d in durations] if grid else durations
        flows = random_demands(prepared, durations, rng)
        inside = pieces_inside(prepared, rng, grid)
        launches = [0.4 * x for x in random_launches(durations, rng)]
        slow = seed in (228, 1385) or (seed < 60 and seed % 3 == 0)
        issue = issue_times(prepared.offsets, 0.4 if seed == 1385 else 0.1, launches, durations)
        work = StepWork(prepared, durations, plan.hop, issue if slow else None, flows, inside)
        with patch.object(StepEnds, "seen"):
            _, period = engine.step_and_period(work)
        _, found = engine.step_and_period(work)
        assert found == pytest.approx(period, rel=1e-7)
        sooner += found != period
        hosted += found != period and slow
    assert sooner > 2 < hosted  # in most others it is equal to the bit


def test_the_work_of_a_step_is_gone_with_its_engines() -> None:
    """Without the garbage collector: streams that wait for each other hold no work."""
    plan, durations = random_plan(3, most_roles=5, most=25)
    prepared = prepare(plan)
    work = StepWork(prepared, durations, flows=random_demands(prepared, durations, Random(3)))
    gone = weakref.ref(work)
    gc.disable()
    try:
        engine.step_and_period(work)
        del work
        assert gone() is None
    finally:
        gc.enable()


@given(
    seed=st.integers(0, 1 << 30),
    each=st.sampled_from([0.0, 0.11]),
    launching=st.booleans(),
    grid=st.sampled_from([0.0, 0.25]),
)
@example(seed=13169, each=0.11, launching=False, grid=0.0)  # two instructions on two roles
def test_pieces_inside_of_steps_end_when_an_event_for_each_ends_them(
    seed: int, each: float, launching: bool, grid: float
) -> None:
    """Compare the engines on a random plan; with `grid`, very many events have the same moment."""
    plan, durations = random_plan(seed, most_roles=5, most=25)
    prepared, rng = prepare(plan), Random(seed)
    if grid:
        durations = [round(d / grid) * grid for d in durations]
    flows = random_demands(prepared, durations, rng)
    inside = pieces_inside(prepared, rng, grid)
    launches = random_launches(durations, Random(seed)) if launching else []
    issue = issue_times(prepared.offsets, each, launches, durations)
    asked = {"latency": plan.hop, "inside": inside, "issue": issue}
    oracle = {**asked, "issue": each, "launches": launches}
    whole = engine.run_engine(prepared, durations, steps=2, flows=flows, **asked)
    assert whole == simpy_engine.run_engine(prepared, durations, steps=2, flows=flows, **oracle)
    with patch.object(StepEnds, "seen"):  # so all streams have to advance alike
        work = StepWork(prepared, durations, flows=flows, **asked)
        alone, period = engine.step_and_period(work)
    assert [alone] == simpy_engine.run_engine(prepared, durations, flows=flows, **oracle)
    assert period == simpy_engine.period(prepared, durations, flows, **oracle)
