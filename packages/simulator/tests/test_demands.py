"""Demands of messages by op: the all-to-all beside reductions, in times that can be told by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.simulator.tests.toys import changed, toy
from piper_ir.fold.timing import IssueOrder, prepare, prepare_orders
from piper_ir.ground.errors import ClusterError
from piper_ir.plan.plan import Channel, Plan
from piper_simulator import Cluster
from piper_simulator.contention.demands import Message, demands
from piper_simulator.contention.flows import message_flows, route, wiring
from piper_simulator.contention.rates import fair_rates
from piper_simulator.durations.communication import by_formula, rank_group
from piper_simulator.durations.device_model import Work
from piper_simulator.times import engine
from tests.helpers.random_plans import PlanBuilder

TOY = toy(
    "toy", {"float32": 1.0}, 1000.0, 1 << 30, 10.0, 0.0, 2.0, 0.0, per_node=4, nodes=2, sms=100
)
"""10 bytes/s per port and 2 per NIC, 1000 of memory, without latency."""
NODE = ((0, 1, 2, 3),)


def message(
    channel: str,
    op: str,
    nbytes: int,
    instances: tuple[tuple[int, ...], ...] = NODE,
    on: Cluster = TOY,
) -> Message:
    """Return a message with the duration that the formula gives it."""
    return Message(
        channel,
        op,
        nbytes,
        by_formula(on, op, nbytes, rank_group(on, instances[0])),
        instances,
        {0: None},
    )


def ends(
    messages: Sequence[Message], after: Sequence[float], on: Cluster = TOY, computing: bool = False
) -> list[float]:
    """When messages of one role are over, each on a stream of its own, that begin after so many seconds (of compute
    that nothing slows, unless `computing`)."""
    names = [m.channel for m in messages]
    seconds = [b - a for a, b in zip([0.0, *after], after)]
    order = IssueOrder(
        "r",
        [stream for name in names for stream in ("compute", name)],
        [channel for name in names for channel in ("", name)],
        str,
        [waits for k, _ in enumerate(names) for waits in ((), (("compute", k + 1),))],
    )
    channels = [Channel(name, "group", ("r",), (name,)) for name in names]
    prepared = prepare_orders([order], channels)
    found = demands(messages if computing else [replace(m, ends={}) for m in messages], wiring(on))
    durations = [s for pair in zip(seconds, [f.seconds for f in found]) for s in pair]
    (times,) = engine.run_engine(prepared, durations, flows=found)
    return times.end[1::2]


def test_an_all_to_all_alone_takes_its_own_time() -> None:
    """3/4 of 80 bytes leave each rank at 10 bytes/s."""
    assert ends([message("a", "all_to_all", 80)], [0.0]) == [6.0]


def test_an_all_to_all_and_an_all_reduce_of_equal_share_take_twice_as_long() -> None:
    """The ring moves 2 x 3/4 of 40 bytes: 6 s as well."""
    both = [message("a", "all_to_all", 80), message("r", "all_reduce", 40)]
    assert ends(both, [0.0, 0.0]) == [12.0, 12.0]


def test_an_all_to_all_in_the_middle_of_an_all_reduce() -> None:
    """10.5 s of reduction, 3 s of exchange from 4 s on: halves until 10; the reduction has 3.5 s left then."""
    both = [message("r", "all_reduce", 70), message("a", "all_to_all", 40)]
    assert ends(both, [0.0, 4.0]) == [13.5, 10.0]


def test_what_an_all_to_all_leaves_of_its_link_slows_it_less() -> None:
    """Measured at 3/4 of the link's rate, 8 s for 6 s of bytes, it gets half of the link: 2 x 3/4 as long."""
    slow = replace(message("a", "all_to_all", 80), seconds=8.0)
    assert ends([slow, message("r", "all_reduce", 400)], [0.0, 0.0])[0] == pytest.approx(12.0)


def test_an_all_to_all_over_two_nodes_takes_nics_and_ports() -> None:
    """Two ranks on each of two nodes: 30 of 90 wire bytes stay on the node, 60 leave it at 2 bytes/s. The 30 take a
    tenth of the port, all of which a ring on the node wants: both slow down to 1 / 1.1."""
    on = changed(TOY, per_node=2)
    across, near = (
        message("a", "all_to_all", 120, ((0, 1, 2, 3),), on),
        message("r", "all_reduce", 400, ((0, 1), (2, 3)), on),
    )
    assert across.seconds == pytest.approx(30.0)
    assert ends([across], [0.0], on) == [pytest.approx(30.0)]
    assert fair_rates(demands([across, near], wiring(on))) == pytest.approx([1 / 1.1, 1 / 1.1])


def test_what_stays_on_nodes_and_what_crosses_do_not_meet() -> None:
    """One rank of each pair on each node: NICs only, beside rings within the nodes."""
    across, near = (
        message("a", "all_to_all", 8, ((0, 4), (1, 5), (2, 6), (3, 7))),
        message("r", "all_reduce", 40, ((0, 1, 2, 3),)),
    )
    assert ends([across, near], [0.0, 0.0]) == [2.0, 6.0]


def test_an_all_to_all_slows_compute_as_a_reduction_does() -> None:
    """0.15 of the SMs beside ports; it reads and writes 10 bytes/s each, of 1000. The compute
    before the second message, 4.15 s alone, runs beside it."""
    found = demands([message("a", "all_to_all", 80)], wiring(TOY))
    assert found[0].takes == {0: (0.15, pytest.approx(0.02))}
    late = ends(
        [message("a", "all_to_all", 80), message("b", "all_to_all", 0)], [0.0, 4.15], computing=True
    )
    assert late == [6.0, pytest.approx(4.15 / 0.83)]


@pytest.mark.parametrize("op", ["all_to_all", "shift"])
@given(per_node=st.integers(1, 4), nodes=st.integers(1, 4), nbytes=st.integers(1, 10**6))
def test_the_route_of_a_message_to_single_members_agrees_with_its_formula(
    op: str, per_node: int, nodes: int, nbytes: int
) -> None:
    """Seconds at its tightest link, where nothing has a latency; and every byte that leaves a device enters one."""
    on = changed(TOY, per_node=per_node, nodes=nodes)
    everyone = tuple(range(per_node * nodes))
    found = route(op, [everyone], wiring(on))
    assert found.wire * nbytes * found.slowest == pytest.approx(
        by_formula(on, op, nbytes, rank_group(on, everyone))
    )
    for link in ("port", "nic"):
        out, into = (
            sum(n for (kind, *_), n in found.passes.items() if kind == f"{link} {way}")
            for way in ("out", "in")
        )
        assert out == pytest.approx(into)
    total = sum(n for (kind, *_), n in found.passes.items() if kind.endswith("out"))
    assert total == pytest.approx(len(everyone) if len(everyone) > 1 else 0)


def test_messages_of_a_plan_ask_for_the_same() -> None:
    """Of the same op, bytes and members, by the way of `contention.flows`."""
    build = PlanBuilder(2, dp=2)
    build.transfer(0, 1, nbytes=100)
    build.all_reduce((0, 1), {})
    plan: Plan = build.plan()
    prepared = prepare(plan)
    work = [Work(10.0, "formula", bytes=100)] * len(prepared)
    by_op = [
        Message("p", "p2p", 100, 10.0, ((0, 2), (1, 3)), {0: None, 1: None}),
        Message("r", "all_reduce", 100, 10.0, ((0, 1, 2, 3),), {0: None, 1: None}),
    ]
    assert demands(by_op, wiring(TOY)) == message_flows(plan, prepared, work, wiring(TOY))


def test_halves_of_a_reduction_take_half_of_its_wire() -> None:
    wires = wiring(TOY)
    assert [
        route(op, NODE, wires).wire for op in ("all_reduce", "all_gather", "reduce_scatter")
    ] == [1.5, 0.75, 0.75]
    assert route("all_reduce", NODE, wires).passes == route("all_gather", NODE, wires).passes


def test_messages_of_one_rank_ask_for_nothing() -> None:
    assert ends([message("a", "all_to_all", 80, ((0,),))], [0.0]) == [0.0]
    assert demands([message("a", "all_to_all", 80, ((0,),))], wiring(TOY))[0].shares == {}


def test_bad_groups_are_named() -> None:
    wires = wiring(TOY)
    with pytest.raises(
        ClusterError,
        match=r"all_to_all of groups of \[1, 2\] ranks; instances of one group have the same",
    ):
        route("all_to_all", [(0, 1), (2,)], wires)
    with pytest.raises(ClusterError, match=r"all_reduce of groups of \[\] ranks"):
        route("all_reduce", [], wires)
    with pytest.raises(ClusterError, match="p2p of 3 ranks; it has a source and a destination"):
        route("p2p", [(0, 1, 2)], wires)
    with pytest.raises(
        ClusterError,
        match=r"channel 'a' has all_to_all of .* and all_reduce of .*channels of their own",
    ):
        demands([message("a", "all_to_all", 80), message("a", "all_reduce", 80)], wires)
