"""Rates of what runs at the same time: fair, within capacity, and no work lost, whatever begins and ends when."""

from collections.abc import Callable, Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.simulator.tests.simpy_engine import EventPool
from piper_simulator.contention.rates import (
    SLOWEST,
    Activity,
    Flow,
    RunningMessage,
    compute_rate,
    fair_rates,
)
from piper_simulator.times.clock import EventClock, EventKey
from piper_simulator.times.shared_activities import SharedActivities

RESOURCES, ROLES = 4, 3


def rates(*shares: Mapping[int, float]) -> list[float]:
    return fair_rates([Flow(i, 1.0, s, max(s.values())) for i, s in enumerate(shares)])


def test_flows_of_one_link_get_the_same_part_of_it() -> None:
    assert rates({0: 1.0}) == [1.0]
    assert rates({0: 1.0}, {0: 1.0}) == [0.5, 0.5]
    assert rates({0: 0.8}, {0: 0.8}) == [0.625, 0.625]


def test_who_needs_less_keeps_it_and_the_others_share_the_rest() -> None:
    assert rates({0: 0.25}, {0: 1.0}, {0: 1.0}) == pytest.approx([1.0, 0.375, 0.375])
    assert rates({0: 0.5}, {0: 0.5}) == [1.0, 1.0]


def test_what_one_bottleneck_holds_back_another_link_gives_to_others() -> None:
    """Two flows share link 0; one of them shares link 1 with a third, which gets what is left there."""
    assert rates({0: 1.0}, {0: 1.0, 1: 0.5}, {1: 1.0}) == pytest.approx([0.5, 0.5, 0.75])


def test_a_message_that_stands_for_many_may_ask_for_more_than_there_is() -> None:
    assert fair_rates([Flow(0, 1.0, {0: 4.0}, 1.0)]) == [0.25]
    assert fair_rates([Flow(0, 1.0, {0: 3.0}, 1.0), Flow(1, 1.0, {0: 1.0}, 1.0)]) == [0.25, 0.25]


def test_the_law_of_compute() -> None:
    assert compute_rate(0.0, 0.0) == 1.0
    assert compute_rate(0.15, 0.1) == 0.75
    assert compute_rate(0.9, 0.9) == SLOWEST


shares = st.dictionaries(
    st.integers(0, RESOURCES - 1), st.sampled_from([0.1, 0.25, 0.5, 0.8, 1.0, 2.5]), max_size=3
)
takes = st.dictionaries(
    st.integers(0, ROLES - 1),
    st.tuples(st.sampled_from([0.0, 0.15, 0.4]), st.sampled_from([0.0, 0.2, 0.5])),
)


@st.composite
def messages(draw: st.DrawFn) -> list[tuple[float, Flow]]:
    """Messages with the moments at which they begin."""
    out = []
    for id in range(draw(st.integers(1, 8))):
        asked = draw(shares)
        seconds, begin = (
            draw(st.sampled_from([0.5, 1.0, 3.0])),
            draw(st.sampled_from([0.0, 0.2, 1.0, 1.7])),
        )
        out.append(
            (
                begin,
                Flow(id, seconds, asked, min(1.0, max(asked.values(), default=0.0)), draw(takes)),
            )
        )
    return sorted(out, key=lambda m: m[0])


@given(messages())
def test_rates_are_fair_within_capacity_and_no_work_is_lost(plan: list[tuple[float, Flow]]) -> None:
    pool, now = EventPool(ROLES, lambda activity: None), 0.0
    under_way: dict[int, Activity] = {
        role - ROLES: pool.compute(role, 5.0, 0.0) for role in range(ROLES)
    }
    work = dict.fromkeys(under_way, 5.0) | {f.id: f.seconds for _, f in plan}
    done = dict.fromkeys(work, 0.0)
    waiting = list(plan)
    while waiting or under_way:
        first = min(under_way, key=lambda k: under_way[k].end, default=None)
        begins = waiting and (first is None or waiting[0][0] < under_way[first].end)
        at = waiting[0][0] if begins else under_way[first].end if first is not None else now
        for k, activity in under_way.items():
            done[k] += activity.rate * (at - now)
        now = at
        if begins:
            _, starting = waiting.pop(0)
            under_way[starting.id] = pool.message(starting, now)
        elif first is not None:
            ended = under_way.pop(first)
            assert done[first] == pytest.approx(work[first], abs=1e-9), (
                "what ends has done all of its work, and no more"
            )
            pool.arrived(ended, now) if isinstance(ended, RunningMessage) else pool.computed(
                first + ROLES
            )
        check([a for a in under_way.values() if isinstance(a, RunningMessage)], under_way)
    assert done == pytest.approx(work, abs=1e-9)


def check(running: list[RunningMessage], under_way: Mapping[int, Activity]) -> None:
    """The rates of a pool against the definitions: capacity, a full bottleneck for whoever is held back, and the law of
    compute. Those of all that runs, not of what a change touches."""
    load = {r: sum(m.flow.shares.get(r, 0.0) * m.rate for m in running) for r in range(RESOURCES)}
    assert all(x <= 1 + 1e-6 for x in load.values()), "no link over capacity"
    for m in running:
        assert 0 < m.rate <= 1
        if m.rate < 1 - 1e-9:
            full = [r for r in m.flow.shares if load[r] > 1 - 1e-6]
            assert any(
                level(m) >= max(level(o) for o in running if r in o.flow.shares) - 1e-6
                for r in full
            ), "max-min fair"
    assert [m.rate for m in running] == pytest.approx(
        fair_rates([m.flow for m in running]), rel=1e-6
    )
    for k, activity in under_way.items():
        if k < 0:
            taken = list(parts(running, k + ROLES))
            assert activity.rate == pytest.approx(
                compute_rate(sum(t[0] for t in taken), sum(t[1] for t in taken))
            )


def level(message: RunningMessage) -> float:
    """The part of its largest resource that a message gets."""
    return message.flow.largest * message.rate


def parts(running: Iterable[RunningMessage], role: int) -> Iterable[tuple[float, float]]:
    for m in running:
        if role in m.flow.takes:
            f_sm, f_memory = m.flow.takes[role]
            yield f_sm, f_memory * m.rate


class CountingClock(EventClock):
    """Notes the moments of the events that are set."""

    def __init__(self) -> None:
        super().__init__()
        self.set: list[float] = []

    def push(self, key: EventKey, call: Callable[[], None]) -> None:
        self.set.append(key[0])
        super().push(key, call)


def test_compute_looks_at_its_end_again_however_often_its_rate_changes() -> None:
    """Forty messages beside it slow it one after the other, and each end makes it faster: that sets no events."""
    clock, ends, left = CountingClock(), list[float](), [40]
    shared = SharedActivities(clock, 1, {})

    def next_message() -> None:
        left[0] -= 1
        if left[0] >= 0:
            shared.message(Flow(left[0], 0.1, {}, 1.0, {0: (0.5, 0.0)}), next_message)

    shared.compute(0, 0, 10.0, lambda: ends.append(clock.now))
    clock.after(1.0, next_message)
    clock.run()
    assert ends == [pytest.approx(12.0)] and clock.set == pytest.approx([10.0, 12.0])
