"""Emulation without processes: what sleeps how long, on a clock that the test owns.

tests/predictions/test_emulation.py has the real one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import Mock

import pytest

from packages.runtime.tests.chains import chain
from piper_ir.ground.errors import JobError
from piper_ir.plan.plan import COMPUTE, Plan
from piper_runtime.engine.engine import Engine
from piper_runtime.engine.streams import HEART_SLOTS, CpuStreams
from piper_runtime.launch.ground.run_options import RunOptions
from piper_runtime.launch.processes.emulation import Durations, emulate, time_scale
from piper_runtime.launch.worker import timed_rank
from piper_runtime.launch.worker.timed_rank import (
    HOST_S,
    LONGEST_S,
    SHORTEST_S,
    EmulationRequest,
    TimedRank,
)
from piper_runtime.rank.binding.rank import Rank
from tests.helpers.cases import each_case


@dataclass
class Clock:
    """Time that passes in sleeps only, each `overshoot` too long."""

    now: float = 100.0
    overshoot: float = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.overshoot


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timed_rank, "time", clock)
    return clock


def alone(
    plan: Plan,
    clock: Clock,
    seconds: Sequence[float],
    issued: Sequence[float] = (),
    host_s: float = 0.0,
) -> tuple[TimedRank, Engine]:
    """The one rank of a plan without communication, bound to streams of this process."""
    request = EmulationRequest(b"", tuple(seconds), 0.0, tuple(issued), host_s, 2, "")
    timed = TimedRank(plan, 0, request, Mock())
    timed.now = clock.now
    heart = [0] * HEART_SLOTS

    def refuse(comm: object) -> Any:
        raise AssertionError("a single rank does not communicate")

    return timed, Engine(cast(Rank, timed), CpuStreams((), heart), refuse, heart)


def single() -> Plan:
    plan, _ = chain(pp=1, microbatches=2)
    assert all(i.stream == COMPUTE for i in plan.roles[0].program)
    return plan


def test_the_time_of_instructions_adds_up_and_steps_follow_each_other(clock: Clock) -> None:
    plan = single()
    n = len(plan.roles[0].program)
    timed, engine = alone(plan, clock, [0.02] * n)
    for step in range(2):
        engine.step(step)
        assert timed.now == clock.now == pytest.approx(100 + (step + 1) * n * 0.02, abs=1e-9)


@pytest.mark.parametrize("overshoot", [HOST_S / 2, 4 * HOST_S])
def test_what_the_machine_sleeps_too_long_does_not_add_up(clock: Clock, overshoot: float) -> None:
    plan = single()
    n = len(plan.roles[0].program)
    clock.overshoot = overshoot
    timed, engine = alone(plan, clock, [0.1] * n)
    engine.step(0)
    assert timed.now == pytest.approx(100 + n * 0.1, abs=1e-9)
    assert clock.now == pytest.approx(timed.now + clock.overshoot, abs=1e-9)
    assert timed.held_up == [0.0] * n


@pytest.mark.parametrize(("held_up", "counts"), [(0.9 * HOST_S, 0), (1.1 * HOST_S, 1)])
def test_negative_control_a_wait_that_the_plan_does_not_show_counts(
    clock: Clock, held_up: float, counts: int
) -> None:
    plan = single()
    n = len(plan.roles[0].program)
    timed, engine = alone(plan, clock, [0.02] * n)
    begin = timed.begin

    def late(step: int) -> None:
        begin(step)
        clock.now += held_up  # as if a lock had been held

    timed.begin = late  # type: ignore[method-assign]  # the fault of this test
    engine.step(0)
    assert timed.now == pytest.approx(100 + n * 0.02 + counts * held_up, abs=1e-9)
    assert timed.held_up == pytest.approx([held_up, *[0.0] * (n - 1)], abs=1e-9)


def test_a_slow_host_holds_instructions_up(clock: Clock) -> None:
    plan = single()
    n = len(plan.roles[0].program)
    timed, engine = alone(plan, clock, [0.02] * n, [k * 0.03 for k in range(1, n + 1)], n * 0.03)
    for step in (1, 2):
        engine.step(step - 1)
        assert timed.now == pytest.approx(100 + step * n * 0.03 + 0.02, abs=1e-9)


def test_a_quick_host_is_ahead_in_the_second_step(clock: Clock) -> None:
    """The first instruction waits for it for 0.5 s, once."""
    plan = single()
    n = len(plan.roles[0].program)
    timed, engine = alone(plan, clock, [0.2] * n, [0.5] * n, host_s=0.6)
    for step in (1, 2):
        engine.step(step - 1)
        assert timed.now == pytest.approx(100 + 0.5 + step * n * 0.2, abs=1e-9)


def test_the_time_scale_makes_the_shortest_instruction_that_matters_long_enough() -> None:
    plan = single()
    n = len(plan.roles[0].program)
    role = plan.roles[0].role
    assert time_scale(plan, Durations({role: [1e-4] * n})) == pytest.approx(SHORTEST_S / 1e-4)
    assert time_scale(plan, Durations({role: [10.0] * n})) == pytest.approx(LONGEST_S / 10), (
        "also downwards"
    )
    assert time_scale(plan, Durations({role: [0.05] * n})) == 1.0
    short = [1e-4] * (n - 1) + [1e-9]
    assert time_scale(plan, Durations({role: short})) == pytest.approx(SHORTEST_S / 1e-4), (
        "a negligible one does not count"
    )
    assert time_scale(plan, Durations({role: [0.0] * n})) == 1.0
    hosted = Durations({role: [1e-9] * n}, host_s={role: n * 1e-4})
    assert time_scale(plan, hosted) == pytest.approx(SHORTEST_S / 1e-4), "the host takes longer"


def test_durations_are_scaled_with_latency_and_hosts() -> None:
    durations = Durations({"a": (1.0, 2.0)}, 0.5, {"a": (0.25, 0.75)}, {"a": 1.5})
    assert durations.scaled(4) == Durations({"a": (4.0, 8.0)}, 2.0, {"a": (1.0, 3.0)}, {"a": 6.0})


@each_case("numbers", [{"steps": 0}, {"steps": True}, {"steps": 1, "timeout_s": 0}])
def test_numbers_that_no_run_can_have(numbers: dict[str, Any]) -> None:
    plan = single()
    with pytest.raises(JobError, match="is needed"):
        durations = Durations({plan.roles[0].role: [0.0] * len(plan.roles[0].program)})
        emulate(plan, durations, RunOptions(**numbers))
