"""The order in which members of an overlap hide each other's messages, against all orders of small groups."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import example, given
from hypothesis import strategies as st

from piper_compiler.passes.order.hiding import GroupMessages, MemberPlace, hidden
from piper_ir.graph.graph import At, OverlapGroup


def group(*sizes: int) -> OverlapGroup:
    return OverlapGroup(
        tuple(tuple((f"m{m}.{k}", 0) for k in range(n)) for m, n in enumerate(sizes)), 0
    )


def orders(sizes: tuple[int, ...], come: tuple[int, ...] = ()) -> Iterator[tuple[MemberPlace, ...]]:
    """Every order of the nodes that keeps that of each member."""
    come = come or (0,) * len(sizes)
    if come == sizes:
        yield ()
    for m, k in enumerate(come):
        if k < sizes[m]:
            for rest in orders(sizes, (*come[:m], k + 1, *come[m + 1 :])):
                yield ((m, k), *rest)


def finish(
    order: tuple[MemberPlace, ...], seconds: dict[MemberPlace, float], messages: GroupMessages
) -> float | None:
    """When a device is done that computes in an order, by hand; None where the order breaks what must come first."""
    if any(order.index(a) > order.index(b) for a, b in messages.first):
        return None
    now = wire = 0.0
    arrival: dict[tuple[MemberPlace, MemberPlace], float] = {}
    for node in order:
        now = (
            max([now, *(at for (_, reader), at in arrival.items() if reader == node)])
            + seconds[node]
        )
        for (sender, reader), taken in sorted(messages.seconds.items()):
            if sender == node:
                wire = max(wire, now) + taken
                arrival[sender, reader] = wire
    return now


def places(found: OverlapGroup, order: tuple[At, ...]) -> tuple[MemberPlace, ...]:
    known = {at: (m, k) for m, member in enumerate(found.members) for k, at in enumerate(member)}
    return tuple(known[at] for at in order)


def chain(member: int, taken: list[float]) -> dict[tuple[MemberPlace, MemberPlace], float]:
    return {((member, k), (member, k + 1)): t for k, t in enumerate(taken) if t}


durations = st.integers(1, 6).map(float)
waits = st.integers(0, 4).map(float)


@given(
    st.lists(st.tuples(durations, waits), min_size=1, max_size=5),
    st.lists(st.tuples(durations, waits), min_size=1, max_size=5),
)
@example(
    [(1.0, 0.0), (2.0, 0.0)], [(1.0, 0.0), (1.0, 0.0), (1.0, 2.0), (1.0, 2.0), (1.0, 0.0)]
)  # four states by the earliest end alone lose it
def test_no_order_ends_earlier(a: list, b: list) -> None:
    found = group(len(a), len(b))
    seconds = {(m, k): d for m, member in enumerate((a, b)) for k, (d, _) in enumerate(member)}
    messages = GroupMessages(
        {**chain(0, [w for _, w in a[:-1]]), **chain(1, [w for _, w in b[:-1]])}, frozenset()
    )
    order = hidden(
        found,
        {
            at: seconds[p]
            for at, p in zip(found.nodes, places(found, tuple(found.nodes)), strict=True)
        },
        messages,
    )
    if not messages.seconds:
        assert order is None
        return
    assert order is not None and sorted(order) == sorted(found.nodes)
    mine = finish(places(found, tuple(order)), seconds, messages)
    every = [t for o in orders((len(a), len(b))) if (t := finish(o, seconds, messages)) is not None]
    assert mine is not None and mine <= min(every)


def test_three_members_keep_what_must_come_first() -> None:
    """F of one microbatch beside I and W of another: W fills what the messages of the others leave."""
    found = group(3, 3, 3)
    seconds = {(m, k): 1.0 for m in range(3) for k in range(3)}
    first = frozenset(((1, k), (2, k)) for k in range(3))
    messages = GroupMessages(chain(0, [3.0, 3.0]) | chain(1, [2.0, 2.0]), first)
    order = hidden(found, dict.fromkeys(found.nodes, 1.0), messages)
    assert order is not None
    mine = finish(places(found, tuple(order)), seconds, messages)
    assert (
        mine
        == min(t for o in orders((3, 3, 3)) if (t := finish(o, seconds, messages)) is not None)
        == 12.0
    )
    assert finish(places(found, tuple(found.nodes)), seconds, messages) == 19.0, (
        "one after the other"
    )


def test_messages_that_fit_beside_the_other_member_are_all_hidden() -> None:
    found = group(4, 4)
    messages = GroupMessages(chain(0, [1.0] * 3) | chain(1, [1.0] * 3), frozenset())
    order = hidden(found, dict.fromkeys(found.nodes, 2.0), messages)
    assert order is not None
    seconds = {(m, k): 2.0 for m in range(2) for k in range(4)}
    assert finish(places(found, tuple(order)), seconds, messages) == 16.0


def test_a_group_that_is_too_large_is_left_to_the_other_orders() -> None:
    found = group(150, 150)
    assert (
        hidden(
            found,
            dict.fromkeys(found.nodes, 1.0),
            GroupMessages(chain(0, [1.0] * 149), frozenset()),
        )
        is None
    )
