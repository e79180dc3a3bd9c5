"""The timing sweep follows each of its rules, names what cannot run, and finds the steady state."""

from dataclasses import replace
from random import Random

import pytest

from piper_ir.fold.issue import issue_times
from piper_ir.fold.steady_state import period
from piper_ir.fold.timing import Times, prepare, sweep
from piper_ir.ground.errors import PlanError
from piper_ir.plan.plan import Plan
from tests.helpers.cases import each_case
from tests.helpers.random_plans import PlanBuilder, given_durations, random_launches, random_plan


def times(plan: Plan, durations: list[float] | None = None, *, issue: float = 0.0) -> Times:
    prepared, seconds = prepare(plan), durations or given_durations(plan)
    return sweep(prepared, seconds, latency=plan.hop, issue=issue_times(prepared.offsets, issue))


def test_a_stream_runs_in_order_and_streams_run_beside_each_other() -> None:
    build = PlanBuilder(2)
    build.compute(0, 2.0)
    build.compute(1, 3.0)
    build.compute(0, 1.0)
    assert times(build.plan()).start == [0.0, 2.0, 0.0]


def test_a_wait_holds_until_the_nth_instruction_of_a_stream_is_done() -> None:
    build = PlanBuilder(2)
    build.compute(0, 2.0)
    build.compute(0, 5.0)
    build.transfer(0, 1, waits=(("compute", 1),))
    build.compute(1, 1.0, waits=(("0>1", 1),))
    assert times(build.plan(), [2.0, 5.0, 0.5, 0.5, 1.0]).start == [0.0, 2.0, 2.0, 2.0, 2.5]


def test_send_and_receive_start_when_both_are_ready() -> None:
    build = PlanBuilder(2)
    build.compute(0, 1.0)
    build.compute(1, 4.0)
    build.transfer(0, 1, waits=(("compute", 1),), to=(("compute", 1),))
    found = times(build.plan(), [1.0, 0.5, 4.0, 0.5])
    assert (found.start[1], found.end[1], found.start[3], found.end[3]) == (4.0, 4.5, 4.0, 4.5)
    assert (found.ready[1], found.ready[3]) == (1.0, 4.0), "ready is each end's own"


def test_a_collective_starts_with_its_last_member() -> None:
    build = PlanBuilder(3)
    for role, seconds in enumerate((1.0, 6.0, 2.0)):
        build.compute(role, seconds)
    build.all_reduce((0, 1, 2), {r: (("compute", 1),) for r in range(3)})
    found = times(build.plan(), [1.0, 0.5, 6.0, 0.5, 2.0, 0.5])
    assert [found.start[n] for n in (1, 3, 5)] == [6.0] * 3
    assert found.makespan == 6.5


def test_latency_holds_waiters_and_not_the_stream() -> None:
    """The second of two transfers of 1 s each starts at 1 s, not at 11 s, with a latency of 10 s."""
    build = PlanBuilder(2, hop=10.0)
    build.transfer(0, 1)
    build.transfer(0, 1)
    build.compute(1, 1.0, waits=(("0>1", 2),))
    found = times(build.plan(), [1.0, 1.0, 1.0, 1.0, 1.0])
    assert found.start == [0.0, 1.0, 0.0, 1.0, 12.0]
    assert (found.end[3], found.done[3], found.makespan) == (2.0, 12.0, 13.0)


def test_done_keeps_the_order_of_a_stream() -> None:
    """An all-reduce without latency is not done for waiters before the transfer ahead of it on its stream is."""
    build = Sharing(2, hop=10.0)
    build.transfer(0, 1)
    build.all_reduce((0,), {})
    found = times(build.plan(), [1.0, 1.0, 1.0])
    assert (found.end[1], found.done[1]) == (2.0, 11.0)


class Sharing(PlanBuilder):
    def stream(self, channel: str, role: int) -> str:
        return "comm"


def test_the_host_issues_in_program_order() -> None:
    build = PlanBuilder(1)
    for _ in range(3):
        build.compute(0, 0.25)
    found = times(build.plan(), issue=1.0)
    assert found.start == found.ready == [1.0, 2.0, 3.0]
    assert found.host == [3.0]


def test_a_step_after_another_goes_on_where_its_streams_are() -> None:
    """The device that is done early starts its next step at once; nothing waits for the slowest."""
    build = PlanBuilder(2)
    build.compute(0, 1.0)
    build.compute(1, 5.0)
    prepared, durations = prepare(build.plan()), given_durations(build.plan())
    first = sweep(prepared, durations)
    assert sweep(prepared, durations, after=first).start == [1.0, 5.0]


def test_the_period_is_shorter_than_the_makespan_where_steps_overlap() -> None:
    """A chain of two devices takes 3 + 2 s; in steady state the slower one is always busy."""
    build = PlanBuilder(2)
    build.compute(0, 3.0)
    build.transfer(0, 1, waits=(("compute", 1),))
    build.compute(1, 2.0, waits=(("0>1", 1),))
    prepared, durations = prepare(build.plan()), given_durations(build.plan())
    assert sweep(prepared, durations).makespan == 5.0
    assert period(prepared, durations) == 3.0


def test_the_period_of_parts_that_share_nothing_is_the_slowest() -> None:
    build = PlanBuilder(2)
    build.compute(0, 3.0)
    build.compute(1, 2.0)
    assert period(prepare(build.plan()), [3.0, 2.0]) == pytest.approx(3.0)


def test_the_period_of_nothing() -> None:
    assert period(prepare(PlanBuilder(1).plan()), []) == 0.0


@each_case("issue", (0.0, 0.01, 0.4))
@each_case("seed", range(30))
def test_the_period_is_what_many_steps_take(seed: int, issue: float) -> None:
    plan, durations = random_plan(seed)
    prepared = prepare(plan)
    host = issue_times(prepared.offsets, issue, random_launches(durations, Random(seed)), durations)
    at: list[float] = []
    last: Times | None = None
    for _ in range(120):
        last = sweep(prepared, durations, latency=plan.hop, issue=host, after=last)
        at.append(max(*last.end, *last.host))
    found = period(prepared, durations, latency=plan.hop, issue=host)
    assert found == pytest.approx((at[-1] - at[59]) / 60, abs=1e-9)


def test_a_host_that_is_slower_than_its_device_decides_the_period() -> None:
    build = PlanBuilder(1)
    for _ in range(3):
        build.compute(0, 1.0)
    prepared, seconds = prepare(build.plan()), [1.0] * 3
    for each, found in ((1.25, 3.75), (0.75, 3.0)):
        host = issue_times(prepared.offsets, each)
        assert period(prepared, seconds, issue=host) == pytest.approx(found)


def swapped(plan: Plan, role: int, a: int, b: int) -> Plan:
    program = list(plan.roles[role].program)
    program[a], program[b] = program[b], program[a]
    roles = list(plan.roles)
    roles[role] = replace(roles[role], program=tuple(program))
    return replace(plan, roles=tuple(roles))


def test_a_deadlock_names_the_cycle() -> None:
    """Two devices that receive before they send, each on one stream, are a deadlock."""
    build = Sharing(2)
    build.transfer(0, 1)
    build.transfer(1, 0)
    plan = build.plan()
    prepare(plan)  # in the order in which it was built it runs
    with pytest.raises(PlanError) as found:
        prepare(swapped(plan, 0, 0, 1))
    lines = str(found.value).splitlines()
    assert lines[0] == "deadlock: these instructions wait for each other"
    assert lines[1].split(" comes ")[0].split(" meets")[0] == lines[-1], (
        "the last line is the first again"
    )
    for part in (
        "role pp0, stream 'comm', instruction 1 0>1.send@0 (Send)",
        "role pp1",
        "1>0.send@0 (Send)",
    ):
        assert part in str(found.value)


def test_a_wait_for_oneself_is_a_deadlock() -> None:
    build = PlanBuilder(1)
    build.compute(0, 1.0, waits=(("compute", 1),))
    with pytest.raises(PlanError, match=r"instruction 0 compute@0 \(Compute\) waits for"):
        prepare(build.plan())


def test_a_send_without_receive_is_refused() -> None:
    build = PlanBuilder(2)
    build.transfer(0, 1)
    build.transfer(0, 1)
    build.programs[1].pop()
    with pytest.raises(
        PlanError,
        match="channel 0>1: use 2 has no counterpart; the channel is used 2 on pp0, 1 on pp1 times",
    ):
        prepare(build.plan())


def test_an_undeclared_channel_is_refused() -> None:
    build = PlanBuilder(2)
    build.transfer(0, 1)
    with pytest.raises(PlanError, match="channel '0>1' is used by pp0, pp1 and not declared"):
        prepare(replace(build.plan(), channels=()))


@each_case("wait", [("compute", 2), ("other", 1)])
def test_a_wait_for_nothing_is_refused(wait: tuple[str, int]) -> None:
    build = PlanBuilder(1)
    build.compute(0, 1.0, waits=(wait,))
    with pytest.raises(PlanError, match=f"waits for {wait[1]} of stream '{wait[0]}', which has"):
        prepare(build.plan())
