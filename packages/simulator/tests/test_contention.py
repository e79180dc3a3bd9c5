"""Contention from a plan and a cluster to times, on plans of a few instructions where every number can be told by
hand."""

import cProfile
import pstats
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.simulator.tests.toys import beside, changed, toy
from piper_ir.fold import steady_state
from piper_ir.fold.issue import issue_times
from piper_ir.fold.timing import Times, prepare, sweep
from piper_ir.ground.errors import ClusterError
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Recv, Send
from piper_ir.program.program import Chunk, Cost, Kernel
from piper_simulator import Cluster, Simulation, SlowLink, simulate
from piper_simulator.contention.flows import Wiring, message_flows, passes, slows_anything, wiring
from piper_simulator.contention.rates import Flow, fair_rates
from piper_simulator.durations.communication import by_formula, rank_group
from piper_simulator.durations.device_model import Work
from piper_simulator.times import engine
from piper_simulator.times.step_work import StepWork
from tests.helpers.cases import each_case
from tests.helpers.random_plans import PlanBuilder, random_plan

TOY = toy(
    "toy", {"float32": 1.0}, 1000.0, 1 << 30, 10.0, 0.0, 2.0, 0.0, per_node=8, nodes=2, sms=100
)
"""1 FLOP/s, 1000 bytes/s of memory, 10 bytes/s per port and 2 per NIC, without latency."""


def captured(build: PlanBuilder) -> Plan:
    """The plan of a builder with kernels that take as long on TOY, so that durations are computed."""

    def computed(chunk: Chunk) -> Chunk:
        seconds = int(chunk.steps["F"].cost.seconds or 0)
        cost = Cost((Kernel("matmul", (1, 1, 1), "float32", seconds, 0),))
        return replace(chunk, steps={"F": replace(chunk.steps["F"], cost=cost)})

    plan = build.plan()
    return replace(plan, chunks=tuple(map(computed, plan.chunks)))


def spans(simulation: Simulation, name: str) -> list[tuple[float, float]]:
    return [(s.start, s.end) for s in simulation.trace.spans if s.name == name]


def ends(build: PlanBuilder, *names: str, on: Cluster = TOY) -> list[float]:
    """When transfers have arrived."""
    s = simulate(captured(build), on)
    return [spans(s, name)[0][1] for name in names]


def fan(*after: int) -> PlanBuilder:
    """Device 0 sends 100 bytes, 10 s alone, to a device each, which takes them after so many seconds of compute."""
    build = PlanBuilder(1 + len(after))
    for r, seconds in enumerate(after, 1):
        build.compute(r, float(seconds))
        build.transfer(0, r, to=(("compute", 1),), nbytes=100)
    return build


def test_one_flow_takes_its_duration() -> None:
    assert ends(fan(3), "0>1.recv@0") == [13.0]


def test_two_flows_on_one_link_take_twice_as_long() -> None:
    assert ends(fan(0, 0), "0>1.recv@0", "0>2.recv@0") == [20.0, 20.0]


def test_three_staggered_flows() -> None:
    """10 s of work each, beginning at 0, 2 and 4: after 4 s they have done 3, 1 and 0. Thirds: the first ends at 4 + 3
    x 7 = 25. The others have 2 and 3 left, halves: the second ends at 29, the third alone at 30."""
    assert ends(fan(0, 2, 4), "0>1.recv@0", "0>2.recv@0", "0>3.recv@0") == pytest.approx(
        [25.0, 29.0, 30.0]
    )


def test_directions_of_a_link_are_apart() -> None:
    build = PlanBuilder(2)
    build.transfer(0, 1, nbytes=100)
    build.transfer(1, 0, nbytes=100)
    assert ends(build, "0>1.recv@0", "1>0.recv@0") == [10.0, 10.0]


def test_receivers_share_their_port_too() -> None:
    build = PlanBuilder(3)
    build.transfer(0, 2, nbytes=100)
    build.transfer(1, 2, nbytes=50)
    assert ends(build, "1>2.recv@0", "0>2.recv@0") == [10.0, 15.0]


def test_a_reduction_and_a_transfer_share_a_port() -> None:
    """dp=2 on a node: the ring of each role moves 2 (n - 1) / n = 1 x 100 bytes out of each device, beside a transfer
    of 100."""
    build = PlanBuilder(2, dp=2)
    build.transfer(0, 1, nbytes=100)
    plan = captured(build)
    assert simulate(plan, TOY).step_s == 10.0
    build.all_reduce((0,), {})
    plan = captured(build)
    prepared = prepare(plan)
    work = [Work(10.0, "formula", bytes=100)] * len(prepared)
    found = message_flows(plan, prepared, work, wiring(TOY))
    (times,) = engine.run_engine(prepared, [10.0] * len(prepared), flows=found)
    assert times.end == [20.0, 20.0, 20.0]
    memory = {members[0]: f.takes[0][1] for f, members in zip(found, prepared.groups, strict=True)}
    assert sorted(memory.values()) == pytest.approx([0.01, 0.02]), (
        "a transfer reads or writes on a rank, a reduction does both"
    )


def test_compute_beside_a_message_is_slowed_by_sms_and_memory() -> None:
    """A transfer of 100 bytes in 10 s takes 0.15 of the SMs and 10 / 1000 of the memory of both devices. 10 s of
    compute: 8.4 done when it ends, 1.6 left."""
    build = PlanBuilder(2)
    build.transfer(0, 1, nbytes=100)
    build.compute(0, 10.0, name="c")
    build.compute(1, 4.0, name="d")
    s = simulate(captured(build), TOY)
    assert spans(s, "c")[0][1] == pytest.approx(11.6)
    assert spans(s, "d")[0][1] == pytest.approx(4 / 0.84)
    assert spans(s, "0>1.send@0") == [(0.0, 10.0)], "messages do not wait for compute"
    assert s.slowed_s == pytest.approx(1.6)
    assert s.bubble_s[0] == pytest.approx(0.0), "what is slow is not idle"


def test_memory_is_taken_at_the_rate_of_the_message() -> None:
    """Two transfers at half speed take as much memory bandwidth as one, and the SMs of two."""
    build = fan(0, 0)
    build.compute(0, 10.0, name="c")
    assert spans(simulate(captured(build), TOY), "c")[0][1] == pytest.approx(
        10 / (1 - 2 * 0.15 - 0.01)
    )


def with_sms(plan: Plan, *sms: int | None) -> Plan:
    return replace(plan, channels=tuple(replace(c, sms=sms) for c in plan.channels))


@each_case(
    ("sms", "rate", "arrives"),
    [(20, 0.79, 10.0), (10, 0.89, 10.0), (5, 0.945, 20.0), (0, 0.99, 10.0)],
)
def test_sms_of_a_stream(sms: int, rate: float, arrives: float) -> None:
    """They are taken from compute; half of what saturates a port halves the speed and the memory; none are copy
    engines."""
    build = PlanBuilder(2)
    build.transfer(0, 1, nbytes=100)
    build.compute(0, 5.0, name="c")
    s = simulate(with_sms(captured(build), sms, sms), TOY)
    assert spans(s, "c")[0][1] == pytest.approx(5 / rate)
    assert spans(s, "0>1.send@0") == [(0.0, arrives)]


def test_a_reduction_takes_the_sms_of_its_stream_but_no_copy_engine() -> None:
    build = OneStream(2, dp=2)
    build.transfer(0, 1, nbytes=100)
    build.all_reduce((0,), {})
    plan = captured(build)
    transfer, reduce = plan.channels
    work = [Work(10.0, "formula", bytes=100)] * 3

    def f_sm(sms: tuple[int | None, int | None]) -> float:
        changed = replace(plan, channels=(replace(transfer, sms=sms), reduce))
        prepared = prepare(changed)
        found = message_flows(changed, prepared, work, wiring(TOY))
        return next(
            f.takes[0][0] for f, members in zip(found, prepared.groups) if len(members) == 1
        )

    assert (f_sm((32, None)), f_sm((None, 32)), f_sm((0, None))) == (0.32, 0.15, 0.15)


class OneStream(PlanBuilder):
    """All channels of a role share a stream."""

    def stream(self, channel: str, role: int) -> str:
        return "comm"


def test_a_device_needs_more_sms_than_its_messages() -> None:
    plan = with_sms(captured(fan(0)), 100, None)
    for contention in (True, False):
        with pytest.raises(
            ClusterError, match=r"stream 0>1 of role pp0 takes 100 SMs; toy:8\*2 has 100 per device"
        ):
            simulate(plan, TOY, contention=contention)
    with pytest.raises(ClusterError, match="does not say how many"):
        simulate(with_sms(plan, 1, None), changed(TOY, sms=0))
    assert simulate(with_sms(plan, 99, None), TOY, contention=False).step_s == 10.0


def wires(nics: int) -> Wiring:
    return replace(wiring(TOY), nics=nics)


def test_ranks_of_a_role_count_on_the_nics_of_their_node() -> None:
    """8 ranks per role and node: with a NIC each, a transfer takes its time; with two NICs, four ranks share one."""
    build = PlanBuilder(2, dp=8)
    build.transfer(0, 1, nbytes=100)
    plan = captured(build)
    prepared = prepare(plan)
    work = [Work(50.0, "formula", bytes=100)] * 2

    def takes(nics: int) -> float:
        return engine.run_engine(
            prepared, [50.0, 50.0], flows=message_flows(plan, prepared, work, wires(nics))
        )[0].makespan

    assert (takes(8), takes(2), takes(1)) == (50.0, 200.0, 400.0)


def test_a_ring_over_two_nodes_uses_the_nics_of_all_its_ranks() -> None:
    """16 ranks, 8 per node: 2 x 15 / 16 x 160 = 300 bytes at min(8 x 2, 10) = 10 bytes/s, in 30 s. An eighth passes
    each NIC: 37.5 of the 60 bytes that it can carry. A transfer beside it wants all of the NIC, the ring all of its
    ports: they get the same part of them."""
    build = PlanBuilder(2, dp=8)
    build.transfer(0, 1, nbytes=100)
    build.all_reduce((0, 1), {})
    plan = captured(build)
    prepared = prepare(plan)
    ring = {
        m
        for members in prepared.groups
        if not prepared.p2p[prepared.group_of[members[0]]]
        for m in members
    }
    work = [
        Work(30.0, "formula", 160) if n in ring else Work(50.0, "formula", 100)
        for n in range(len(prepared))
    ]
    transfer, reduce = message_flows(plan, prepared, work, wires(8))
    (nic,) = {r for r in transfer.shares if r in reduce.shares and transfer.shares[r] == 1.0}
    assert reduce.shares[nic] == pytest.approx(37.5 / 60)
    assert fair_rates([transfer, reduce]) == pytest.approx([60 / 97.5, 60 / 97.5])


def test_where_nothing_slows_anything_results_are_those_without() -> None:
    """Compute and messages take turns here; on a CPU, and where durations are given, there is nothing to share."""
    build = PlanBuilder(2)
    for _ in range(3):
        build.compute(
            0, 3.0, waits=(("1>0", build.count(0, "1>0")),) if build.count(0, "1>0") else ()
        )
        build.transfer(0, 1, waits=(("compute", build.count(0, "compute")),), nbytes=70)
        build.compute(1, 2.0, waits=(("0>1", build.count(1, "0>1")),))
        build.transfer(1, 0, waits=(("compute", build.count(1, "compute")),), nbytes=70)
    plan = captured(build)
    on, off = simulate(plan, TOY), simulate(plan, TOY, contention=False)
    assert on.trace == off.trace and on.slowed_s == 0.0 and off.slowed_s is None
    assert simulate(captured(fan(0, 0)), changed(TOY, synchronous=True)).slowed_s is None
    assert simulate(fan(0, 0).plan(), TOY).slowed_s is None


def test_the_period_under_contention() -> None:
    """Each step 2 s of compute and then 10 s beside the transfer of what they made, 11.6 s."""
    build = PlanBuilder(2)
    build.compute(0, 2.0)
    build.transfer(0, 1, waits=(("compute", 1),), nbytes=100)
    build.compute(0, 10.0)
    plan = captured(build)
    s = simulate(plan, TOY, steps=4)
    assert (s.step_s, s.period_s) == (pytest.approx(13.6), pytest.approx(13.6))
    assert simulate(plan, TOY, contention=False).period_s == 12.0


def test_the_period_of_streams_that_run_ahead() -> None:
    """Transfers of 10 s a step beside compute of 10 s a step never pause, however far ahead they are."""
    build = PlanBuilder(2)
    build.transfer(0, 1, nbytes=100)
    build.compute(0, 10.0)
    s = simulate(captured(build), TOY)
    assert (s.step_s, s.period_s) == (pytest.approx(11.6), pytest.approx(10 / 0.84))


def test_the_period_where_a_stream_runs_far_ahead() -> None:
    """16 steps of transfers are over before the compute of one: it is slowed in its first step only."""
    build = PlanBuilder(2)
    build.transfer(0, 1, nbytes=1)
    build.compute(0, 10.0)
    assert simulate(captured(build), TOY).period_s == pytest.approx(10.0)


def test_no_more_steps_run_than_show_that_they_repeat() -> None:
    """One alone, and of the steps behind it the first sixteenths; the copy of the engine takes half a step."""
    build = PlanBuilder(2)
    for _ in range(40):
        build.compute(0, 1.0)
        build.transfer(0, 1, waits=(("compute", 1),), nbytes=8)
    plan = captured(build)
    prepared, durations = prepare(plan), [1.0] * sum(len(role.program) for role in plan.roles)
    work = [Work(1.0, "formula", bytes=8) for _ in durations]
    found = message_flows(plan, prepared, work, wiring(TOY))

    def calls(run: Callable[[], object]) -> int:
        profile = cProfile.Profile()
        profile.runcall(run)
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]  # typeshed leaves it out

    step = calls(lambda: engine.run_engine(prepared, durations, flows=found))
    found_calls = calls(lambda: engine.step_and_period(StepWork(prepared, durations, flows=found)))
    assert step < found_calls < 2.5 * step


@given(seed=st.integers(0, 1 << 30))
def test_the_period_of_a_plan_is_that_of_its_sweep_or_longer(seed: int) -> None:
    plan, durations, found = random_flows(seed)
    prepared = prepare(plan)
    issue = issue_times(prepared.offsets, 0.01)
    _, period = engine.step_and_period(StepWork(prepared, durations, plan.hop, issue, found))
    assert period >= 0.99 * steady_state.period(prepared, durations, latency=plan.hop, issue=issue)


def random_flows(seed: int) -> tuple[Plan, list[float], list[Flow]]:
    """A random plan, most of whose channels share a resource and slow their roles."""
    plan, durations = random_plan(seed)
    prepared = prepare(plan)
    out = []
    for g, members in enumerate(prepared.groups):
        roles = {next(r for r, b in enumerate(prepared.offsets[1:]) if m < b) for m in members}
        shares = {(seed + g) % 3: 0.5 + (g % 2) / 2} if g % 5 else {}
        largest = max(shares.values(), default=0.0)
        out.append(
            Flow(
                g,
                durations[members[0]],
                shares,
                largest,
                dict.fromkeys(sorted(roles), (0.1, 0.2 * largest)),
            )
        )
    return plan, durations, out


@given(seed=st.integers(0, 1 << 30), steps=st.integers(1, 2))
def test_without_shares_the_engine_equals_the_sweep(seed: int, steps: int) -> None:
    plan, durations, found = random_flows(seed)
    alone = [replace(f, shares={}, takes={}) for f in found]
    prepared, before = prepare(plan), None
    assert not slows_anything(alone)
    issue = issue_times(prepared.offsets, 0.13)
    for times in engine.run_engine(
        prepared, durations, latency=plan.hop, issue=issue, steps=steps, flows=alone
    ):
        before = sweep(prepared, durations, latency=plan.hop, issue=issue, after=before)
        assert near(times, before)


def near(a: Times, b: Times) -> bool:
    return (
        a.start == pytest.approx(b.start)
        and a.end == pytest.approx(b.end)
        and a.done == pytest.approx(b.done)
    )


@given(seed=st.integers(0, 1 << 30))
def test_links_carry_no_more_than_they_can_and_nothing_is_earlier(seed: int) -> None:
    plan, durations, found = random_flows(seed)
    prepared = prepare(plan)
    (times,) = engine.run_engine(prepared, durations, latency=plan.hop, flows=found)
    assert engine.run_engine(prepared, durations, latency=plan.hop, flows=found) == [times]
    alone = sweep(prepared, durations, latency=plan.hop)
    assert all(a >= b - 1e-9 for a, b in zip(times.done, alone.done, strict=True))
    lasted = [end - start for start, end in zip(times.start, times.end, strict=True)]
    assert all(took >= d - 1e-9 for took, d in zip(lasted, durations, strict=True) if d)
    for resource in range(3):
        users = [
            (m[0], f)
            for m, f in zip(prepared.groups, found, strict=True)
            if resource in f.shares and f.seconds
        ]
        moments = sorted({t for m, _ in users for t in (times.start[m], times.end[m])})
        for a in moments:
            for b in (x for x in moments if x > a):
                inside = sum(
                    f.shares[resource] * f.seconds
                    for m, f in users
                    if a <= times.start[m] and times.end[m] <= b
                )
                assert inside <= b - a + 1e-6, (
                    "what begins and ends within a span fits through the link in that span"
                )


@settings(max_examples=200)
@given(seed=st.integers(0, 1 << 30))
def test_a_message_alone_takes_as_long_as_its_links(seed: int) -> None:
    """Without latency: what `communication` computes of oversubscription, rails, slow links and kinds of devices is
    what the tightest of the links lets pass. A ring of unequal numbers per node, or with a slow link that not all use,
    may take longer."""
    rng = Random(seed)
    kinds = rng.randint(1, 3) if rng.random() < 0.5 else 0
    slow = (SlowLink(0, rng.randint(0, 3), 3.0),) if rng.random() < 0.5 else ()
    on = changed(
        TOY,
        per_node=4,
        nodes=4,
        rails=rng.choice((1, 2, 4)),
        oversubscription=rng.choice((1.0, 2.5)),
        slow_links=slow,
    )
    if kinds:
        on = beside(on, 1, kinds, changed(TOY, intra_bandwidth=4.0, inter_bandwidth=3.0))
    p2p = rng.random() < 0.5
    members = tuple(sorted(rng.sample(range(16), 2 if p2p else rng.randint(1, 16))))
    where = rank_group(on, members)
    wires = wiring(on)
    slowest = max(
        (n / wires.capacity(r) for r, n in passes(wires, members, p2p).items()), default=0.0
    )
    wire = 1.0 if p2p else 2 * (len(members) - 1) / len(members)
    seconds = by_formula(on, "p2p" if p2p else "all_reduce", 1000, where)
    if p2p or (where.least == where.most and not (slow and kinds)):
        assert seconds == pytest.approx(1000 * wire * slowest)
    else:
        assert seconds >= 1000 * wire * slowest * (1 - 1e-9)


@each_case(
    ("change", "alone"),
    [
        ({}, 50.0),
        ({"oversubscription": 2.0}, 100.0),
        ({"oversubscription": 2.0, "rails": 8}, 50.0),
        ({"slow_links": (SlowLink(0, 1, 3.0),)}, 150.0),
    ],
)
def test_two_flows_over_what_narrows_a_link(change: dict[str, Any], alone: float) -> None:
    """Rank 0 sends 100 bytes to rank 8, on the other node, and after it another: on two streams they take as long as
    one after the other. Device 8 is on the same rail."""
    build = TwoStreams(9)
    build.transfer(0, 8, nbytes=100)
    on = changed(TOY, **change)
    assert ends(build, "0>8.recv@0", on=on) == [pytest.approx(alone)]
    build.second = "again"
    build.transfer(0, 8, nbytes=100)
    assert simulate(captured(build), on).step_s == pytest.approx(2 * alone)


def test_what_changes_rails_shares_the_spine_and_leaves_the_rail_free() -> None:
    """Eight rails, half a spine: rank 0 sends to 9 on another rail, alone in 100 s with all of its spine and half of
    its NIC; and to 8 on its own, alone in 50 s. Together both get two thirds of what they want most: 75 s, and 125 s
    for the other."""
    build = PlanBuilder(10)
    build.transfer(0, 9, nbytes=100)
    build.transfer(0, 8, nbytes=100)
    on = changed(TOY, oversubscription=2.0, rails=8)
    assert ends(build, "0>9.recv@0", "0>8.recv@0", on=on) == [
        pytest.approx(125.0),
        pytest.approx(75.0),
    ]


def test_a_slow_link_within_a_node() -> None:
    build = PlanBuilder(3)
    build.transfer(0, 1, nbytes=100)
    build.transfer(0, 2, nbytes=100)
    on = changed(TOY, slow_links=(SlowLink(0, 0, 4.0),))
    assert ends(build, "0>1.recv@0", "0>2.recv@0", on=on) == [
        pytest.approx(80.0),
        pytest.approx(80.0),
    ]


class TwoStreams(PlanBuilder):
    """A second channel between two roles, once `second` names it."""

    second = ""

    def transfer(
        self, source: int, target: int, waits: Any = (), to: Any = (), nbytes: int = 0
    ) -> None:
        before = dict(self.channels)
        super().transfer(source, target, waits, to, nbytes)
        if not self.second:
            return
        name, again = f"{source}>{target}", f"{source}>{target}{self.second}"
        self.channels = {
            **before,
            again: replace(self.channels[name], id=again, streams=(again, again)),
        }
        for r in (source, target):
            last = self.programs[r].pop()
            part = last.parts[0]
            assert isinstance(part.op, Send | Recv)
            self.programs[r].append(
                replace(
                    last, stream=again, parts=(replace(part, op=replace(part.op, channel=again)),)
                )
            )
