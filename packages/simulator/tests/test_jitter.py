"""Distributions of a step: the law against closed forms, what ranks do to it, and what is refused. Sampling errors are
those of known seeds: a bound of four standard errors."""

from dataclasses import replace
from math import exp, log, pi
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.simulator.tests.toys import changed, toy
from piper_ir.ground.errors import PlanError
from piper_ir.plan.plan import Plan
from piper_simulator import Cluster, simulate
from piper_simulator.times import jitter
from piper_simulator.times.jitter import Distribution
from tests.helpers.cases import each_case
from tests.helpers.random_plans import PlanBuilder, random_plan

FLAT = toy("flat", {"float32": 1.0}, 1000.0, 1 << 30, 10.0, 0.0, 2.0, 0.0, per_node=8)


def in_a_row(n: int, *, dp: int = 1, reduced: bool = False) -> Plan:
    """So many instructions of 1 s on each rank, and a reduction over dp that takes no time."""
    build = PlanBuilder(1, dp=dp)
    for _ in range(n):
        build.compute(0, 1.0)
    if reduced:
        build.all_reduce((0,), {0: (("compute", n),)})
    return build.plan()


def spread(
    plan: Plan, c: float, repetitions: int = 400, on: Cluster | None = None, seed: int = 7
) -> Distribution:
    return simulate(plan, on).distribution(c, seed=seed, repetitions=repetitions)


def test_a_sum_of_independent_instructions() -> None:
    """100 s in 100 instructions with c = 5 %: a standard deviation of 0.05 x sqrt(100) = 0.5 s."""
    found = spread(in_a_row(100), 0.05)
    for of in (found.step_s, found.period_s):
        assert of.mean == pytest.approx(100, abs=4 * 0.5 / 400**0.5)
        assert of.std == pytest.approx(0.5, rel=4 / 800**0.5)
    assert (found.ranks, found.world, found.note) == (1, 1, "")


def test_the_law_is_lognormal_with_mean_1() -> None:
    found = spread(in_a_row(1), 0.5, 3000).step_s
    variance = log(1.25)
    assert found.mean == pytest.approx(1, abs=4 * 0.5 / 3000**0.5)
    for q, value in ((-1.645, found.p5), (0.0, found.median), (1.645, found.p95)):
        assert value == pytest.approx(exp(q * variance**0.5 - variance / 2), rel=0.08)
    assert found.p95 - found.median > 1.5 * (found.median - found.p5), "to the right"


def test_messages_vary_too_and_once_for_both_ends() -> None:
    build = PlanBuilder(2)
    build.transfer(0, 1, nbytes=100)
    found = spread(replace(build.plan(), chunks=()), 0.1, on=FLAT).step_s
    assert found.mean == pytest.approx(10, abs=4 / 400**0.5)
    assert found.std == pytest.approx(1.0, rel=0.2)


@each_case(("ranks", "more"), [(1, 0.0), (2, 1 / pi**0.5), (8, 1.4236)])
def test_replicas_wait_for_the_latest_of_them(ranks: int, more: float) -> None:
    """The expected largest of n normal numbers lies 0, 0.564, 1.424 standard deviations above their mean; the sum of 25
    instructions is nearly normal, with 0.02 x 5 = 0.1 s."""
    found = spread(in_a_row(25, dp=ranks, reduced=True), 0.02)
    assert found.step_s.mean == pytest.approx(25 + 0.1 * more, abs=4 * 0.1 / 400**0.5)
    assert found.ranks == ranks


def test_without_a_meeting_steps_do_not_wait_for_each_other() -> None:
    """The step ends with the last of 4 ranks; later steps too, but each rank goes on: over many steps the period is the
    mean."""
    found = spread(in_a_row(25, dp=4), 0.02)
    assert found.step_s.mean > 25.07
    assert found.period_s.mean == pytest.approx(25, abs=0.02)


def test_no_jitter_is_a_point() -> None:
    build = PlanBuilder(2, dp=3)
    build.compute(0, 3.0)
    build.transfer(0, 1, waits=(("compute", 1),), nbytes=16)
    build.compute(1, 2.0, waits=(("0>1", 1),))
    build.all_reduce((0, 1), {0: (("compute", 1),), 1: (("compute", 1),)})
    s = simulate(build.plan(), changed(FLAT, slow_ranks={1: 1.7}))
    found = s.distribution(0, repetitions=5)
    assert found.step_s.p5 == found.step_s.median == found.step_s.p95 == s.step_s
    assert found.step_s.std == 0 and found.period_s.median == pytest.approx(s.period_s)


def test_the_seed_decides() -> None:
    plan = in_a_row(5, dp=2, reduced=True)
    assert spread(plan, 0.1, 20) == spread(plan, 0.1, 20)
    assert spread(plan, 0.1, 20) != spread(plan, 0.1, 20, seed=8)
    assert spread(plan, 0.1, 20).as_dict()["step_s"].keys() == {
        "p5",
        "median",
        "p95",
        "mean",
        "std",
    }


def test_of_many_replicas_some_draw_and_one_of_each_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, on = in_a_row(4, dp=8, reduced=True), changed(FLAT, slow_ranks={6: 2.0})
    every = spread(plan, 0.01, 20, on)
    assert (every.ranks, every.note) == (8, "")
    monkeypatch.setattr(jitter, "MOST", 4 * 5 * 2 * 23)
    some = spread(plan, 0.01, 20, on)
    assert (some.ranks, some.world) == (4, 8)
    assert some.note.startswith("4 of 8 replicas drew durations")
    monkeypatch.setattr(jitter, "MOST", 0)
    two = spread(plan, 0.01, 20, on)
    assert two.ranks == 2 and two.step_s.median == pytest.approx(8, rel=0.02), (
        "rank 6 is one of them"
    )


@each_case(
    ("arguments", "message"),
    [
        ({"jitter": -0.1}, "jitter is -0.1; a coefficient of variation from 0 to 10 is needed"),
        ({"jitter": float("nan")}, "jitter is nan"),
        ({"jitter": "much"}, "jitter is 'much'"),
        (
            {"jitter": 0.1, "repetitions": 0},
            "repetitions is 0; a whole number from 1 to 100000 is needed",
        ),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        simulate(in_a_row(1)).distribution(**arguments)


@settings(max_examples=30)
@given(seed=st.integers(0, 1 << 30), c=st.sampled_from([0.01, 0.3]))
def test_percentiles_are_in_order(seed: int, c: float) -> None:
    plan, _ = random_plan(seed, most=20)
    found = simulate(plan).distribution(c, seed=seed, repetitions=8)
    for of in (found.step_s, found.period_s):
        assert 0 <= of.p5 <= of.median <= of.p95 and of.std >= 0
