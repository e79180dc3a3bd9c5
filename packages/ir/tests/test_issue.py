"""When hosts issue, by hand: a host runs ahead of a slower device, over instructions and over steps."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_ir.fold.issue import issue_times
from piper_ir.fold.steady_state import period
from piper_ir.fold.timing import Times, prepare, sweep
from tests.helpers.cases import each_case
from tests.helpers.random_plans import PlanBuilder


def steps(
    launches: Sequence[float], durations: Sequence[float], each: float = 0.0, count: int = 1
) -> list[Times]:
    """Steps of one device that follow each other without a barrier."""
    build = PlanBuilder(1)
    for seconds in durations:
        build.compute(0, seconds)
    prepared = prepare(build.plan())
    issue = issue_times(prepared.offsets, each, launches, durations)
    found: list[Times] = []
    for _ in range(count):
        after = found[-1] if found else None
        found.append(sweep(prepared, durations, issue=issue, after=after))
    return found


@each_case(
    ("launches", "durations", "start"),
    [
        ((4, 4, 4), (1, 1, 1), [3, 7, 11]),  # each ends with its last launch
        ((1, 1, 1), (4, 4, 4), [0, 4, 8]),  # hidden behind the kernels
        ((5, 1, 1, 5), (2, 6, 2, 2), [3, 5, 11, 13]),  # the host catches up while the second runs
    ],
    ids=["launches", "kernels", "mixed"],
)
def test_an_instruction_waits_for_its_launches(
    launches: tuple[float, ...], durations: tuple[float, ...], start: list[float]
) -> None:
    (found,) = steps(launches, durations)
    assert found.start == start and found.host == [sum(launches)]


def test_the_hosts_own_time_comes_before_the_launches() -> None:
    (found,) = steps((3, 1), (1, 5), each=2)
    assert found.start == [2 + 3 - 1, 2 + 3 + 2] and found.host == [8]


def test_a_host_is_ahead_in_the_second_step_if_its_device_is_slower() -> None:
    """The first instruction waits for 4 s of launches; in the next step the host is through with it before."""
    first, second, third = steps((5, 1), (1, 9), count=3)
    assert first.start == [4, 5] and first.makespan == 14
    assert second.start == [14, 15] and second.makespan == 24
    assert [t.host for t in (first, second, third)] == [[6], [12], [18]]


def test_a_slower_host_decides_the_period() -> None:
    build = PlanBuilder(1)
    for _ in range(2):
        build.compute(0, 1.0)
    prepared = prepare(build.plan())
    issue = issue_times(prepared.offsets, 0.5, (2.0, 3.0), (1.0, 1.0))
    assert period(prepared, (1.0, 1.0), issue=issue) == pytest.approx(0.5 + 2.0 + 0.5 + 3.0)


def test_hosts_of_two_roles_do_not_wait_for_each_other() -> None:
    build = PlanBuilder(2)
    for role in (0, 1, 1):
        build.compute(role, 1.0)
    issue = issue_times(prepare(build.plan()).offsets, 0.0, (3.0, 2.0, 4.0), (1.0,) * 3)
    assert issue is not None and (issue.at, issue.step_s) == ([2.0, 1.0, 5.0], [3.0, 6.0])
    assert issue_times(prepare(build.plan()).offsets, 0.0, (0.0,) * 3, (1.0,) * 3) is None


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 8)), min_size=1), st.sampled_from((0, 1))
)
def test_kernels_that_take_longer_hide_all_launches(
    drawn: list[tuple[int, int]], each: int
) -> None:
    """A step takes as long as its kernels, after the host's time for the first instruction."""
    durations = [seconds + each for seconds, _ in drawn]
    launches = [min(seconds, launch) for seconds, launch in drawn]
    first, second = steps(launches, durations, each, count=2)
    assert first.makespan == each + sum(durations)
    assert second.makespan == first.makespan + sum(durations)
