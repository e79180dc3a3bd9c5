"""The engine under contention against `fluid`, on random plans with random demands, and on plans whose demands are
those of a cluster: there no link carries more bytes than it can, whichever of them the simulator leaves out or merges.
"""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.simulator.tests.fluid import Fluid, Rates, water_levels
from packages.simulator.tests.toys import toy
from piper_ir.fold.issue import issue_times
from piper_ir.fold.timing import Prepared, Times, prepare
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import COMM, message_op
from piper_simulator.contention.flows import Resource, Wiring, message_flows, route, wiring
from piper_simulator.contention.rates import Flow, fair_rates
from piper_simulator.durations.device_model import Work
from piper_simulator.durations.instances import instances
from piper_simulator.times import engine
from tests.helpers.random_plans import PlanBuilder, random_launches, random_plan


def random_demands(prepared: Prepared, durations: list[float], rng: Random) -> list[Flow]:
    """A flow per channel, which follow each other: some of several links, some that stand for many ranks, some that ask
    for nothing."""
    out = []
    for g, members in enumerate(prepared.groups):
        links = rng.sample(range(4), rng.randint(0, 3))
        one = {r: rng.choice((0.1, 0.3, 0.5, 0.73, 1.0)) for r in links}
        shares = {r: x * rng.choice((1, 1, 1, 2, 4)) for r, x in one.items()}
        roles = {next(r for r, b in enumerate(prepared.offsets[1:]) if m < b) for m in members}
        takes = {
            r: (rng.choice((0.0, 0.02, 0.15, 0.5)), rng.choice((0.0, 0.1, 0.4)))
            for r in sorted(roles)
        }
        out.append(Flow(g, durations[members[0]], shares, max(one.values(), default=0.0), takes))
    return out


def near(prepared: Prepared, found: list[Times], by: Fluid) -> None:
    for step, times in enumerate(found):
        for x in range(len(prepared)):
            assert times.start[x] == pytest.approx(by.start[step, x], abs=1e-7), (step, x)
            assert times.end[x] == pytest.approx(by.end[step, x], abs=1e-7), (step, x)


@given(
    seed=st.integers(0, 1 << 30),
    steps=st.integers(1, 2),
    issue=st.sampled_from([0.0, 0.0, 0.11]),
    launching=st.booleans(),
)
def test_the_engine_equals_rates_computed_anew_at_each_moment(
    seed: int, steps: int, issue: float, launching: bool
) -> None:
    plan, durations = random_plan(seed, most_roles=4, most=25)
    prepared = prepare(plan)
    found = random_demands(prepared, durations, Random(seed))
    launches = random_launches(durations, Random(seed)) if launching else []
    by = Fluid(prepared, durations, found, plan.hop, issue, steps, launches)
    by.run()
    near(
        prepared,
        engine.run_engine(
            prepared,
            durations,
            latency=plan.hop,
            issue=issue_times(prepared.offsets, issue, launches, durations),
            steps=steps,
            flows=found,
        ),
        by,
    )


parts = st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 0.73, 1.0]) | st.floats(0.01, 1.0)
links = st.dictionaries(
    st.integers(0, 4), st.tuples(parts, st.sampled_from([1, 1, 2, 3, 7])), max_size=3
)


@given(st.lists(links, min_size=1, max_size=8))
def test_rates_are_those_that_bisection_finds(asked: list[dict[int, tuple[float, int]]]) -> None:
    found = [
        Flow(
            i,
            1.0,
            {r: x * n for r, (x, n) in of.items()},
            max((x for x, _ in of.values()), default=0.0),
        )
        for i, of in enumerate(asked)
    ]
    assert fair_rates(found) == pytest.approx(water_levels(found), rel=1e-5)


def random_transfers(rng: Random) -> Plan:
    """Transfers and reductions of 1 to 3 roles with up to 6 ranks each, all of which begin within a second."""
    build = PlanBuilder(rng.randint(1, 3), dp=rng.choice((1, 2, 3, 4, 6)))
    for _ in range(rng.randint(1, 8)):
        role = rng.randrange(build.roles)
        if rng.random() < 0.3:
            build.compute(role, rng.choice((0.2, 0.5, 1.0)))
        elif rng.random() < 0.5 and build.roles > 1:
            a, b = rng.sample(range(build.roles), 2)
            build.transfer(a, b, nbytes=rng.randint(1, 50))
        else:
            build.all_reduce(
                tuple(sorted(rng.sample(range(build.roles), rng.randint(1, build.roles)))), {}
            )
    return build.plan()


@given(seed=st.integers(0, 1 << 30))
def test_no_link_of_a_cluster_carries_more_than_it_can_and_no_byte_is_lost(seed: int) -> None:
    rng = Random(seed)
    plan = random_transfers(rng)
    prepared, per_node = prepare(plan), rng.choice((1, 2, 3, 4))
    cluster = toy(
        "toy",
        {"float32": 1.0},
        1000.0,
        1 << 30,
        10.0,
        0.0,
        4.0,
        0.0,
        per_node=per_node,
        nodes=18,
        sms=100,
    )
    wires = replace(wiring(cluster), nics=rng.randint(1, per_node))
    work, carried = messages(plan, prepared, wires, rng)
    found = message_flows(plan, prepared, work, wires)
    durations = [w.seconds for w in work]

    def seen(rates: Rates) -> None:
        load: dict[Resource, float] = {}
        for g, rate in rates.items():
            for resource, per_second in carried[g].items():
                load[resource] = load.get(resource, 0.0) + per_second * rate
        assert all(x <= wires.capacity(r) * (1 + 1e-6) for r, x in load.items())

    by = Fluid(prepared, durations, found, seen=seen)
    by.run()
    near(prepared, engine.run_engine(prepared, durations, flows=found), by)


def messages(
    plan: Plan, prepared: Prepared, wires: Wiring, rng: Random
) -> tuple[list[Work], dict[int, dict[Resource, float]]]:
    """Per node its work, messages as long as their tightest link makes them or longer; per group the bytes per second
    that pass through each link at full speed, of all ranks."""
    ops = [instr.parts[0].op for _, _, instr in plan.instructions()]
    work = [Work(rng.choice((0.1, 1.0)), "formula") for _ in ops]
    carried = {}
    for g, members in enumerate(prepared.groups):
        op = ops[members[0]]
        assert isinstance(op, COMM)
        way, nbytes = (
            route(message_op(op), instances(plan, plan.channel(op.channel)), wires),
            rng.randint(1, 60),
        )
        seconds = way.wire * nbytes * way.slowest * rng.choice((1.0, 1.0, 1.5, 4.0))
        for x in members:
            work[x] = Work(seconds, "formula", bytes=nbytes)
        carried[g] = (
            {r: n * way.wire * nbytes / seconds for r, n in way.passes.items()} if seconds else {}
        )
    return work, carried
