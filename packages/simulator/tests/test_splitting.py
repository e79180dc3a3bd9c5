"""Roles split by what differs: the same times as if every rank were a role of its own, at the cost of the classes."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_ir.mesh import Mesh
from piper_ir.ops import COMM, AllReduce
from piper_ir.plan import Channel, Instr, Plan, RolePlan, Value
from piper_ir.program import Chunk, Cost, Kernel
from piper_ir.sizes import TensorSpec
from piper_simulator import Cluster, Simulation, simulate
from piper_simulator.cluster import Nodes, SlowLink
from piper_simulator.splitting import each_rank, split
from tests.random_plans import PlanBuilder

FLAT = Cluster("flat", {"float32": 1.0}, 1000.0, 1 << 30, 10.0, 0.0, 2.0, 0.0, per_node=8, nodes=2, sms=100)
"""1 FLOP/s, 1000 bytes/s of memory, 10 bytes/s per port and 2 per NIC, without latency."""
FAST = replace(FLAT, device="fast", peak_flops={"float32": 2.0}, intra_bandwidth=30.0, inter_bandwidth=3.0, memory_bandwidth=500.0)


def computed(plan: Plan) -> Plan:
    """With kernels that take as long on FLAT in place of given durations."""

    def chunk(c: Chunk) -> Chunk:
        cost = Cost((Kernel("matmul", (1, 1, 1), "float32", int(c.steps["F"].cost.seconds or 0), 0),))
        return replace(c, steps={"F": replace(c.steps["F"], cost=cost)})

    return replace(plan, chunks=tuple(map(chunk, plan.chunks)))


def on_mesh(plan: Plan, mesh: Mesh, channels: dict[str, Channel]) -> Plan:
    roles = tuple(replace(role, ranks=mesh.ranks(role.placed)) for role in plan.roles)
    return replace(plan, mesh=mesh, roles=roles, channels=tuple(channels.values()))


def random_work(rng: Random) -> Plan:
    """A pipeline of one to three roles on a mesh with dp and tp, with transfers and reductions of all kinds."""
    p = rng.randint(1, 3)
    build = PlanBuilder(p, hop=rng.choice((0.0, 0.5)))
    build.compute(0, 1.0)
    for _ in range(rng.randint(2, 12)):
        kind = rng.random()
        if kind < 0.5 or p == 1 and kind < 0.8:
            role = rng.randrange(p)
            build.compute(role, float(rng.randint(1, 9)), waits(rng, build, role, "compute"))
        elif kind < 0.8:
            a, b = rng.sample(range(p), 2)
            name = f"{a}>{b}"
            build.transfer(a, b, waits(rng, build, a, name), waits(rng, build, b, name), nbytes=rng.choice((0, 10, 40)))
        else:
            members = tuple(sorted(rng.sample(range(p), rng.randint(1, p))))
            name = "=".join(map(str, members))
            build.all_reduce(members, {m: waits(rng, build, m, name) for m in members})
    overs = ((), ("dp",), ("tp",), ("dp", "tp"))
    channels = {c.id: replace(c, over=rng.choice(overs)) if c.kind == "group" else c for c in build.channels.values()}
    plan = computed(build.plan())
    return on_mesh(reducing(plan, rng.choice((0, 24))), Mesh(pp=p, dp=rng.randint(1, 4), tp=rng.randint(1, 3)), channels)


def reducing(plan: Plan, nbytes: int) -> Plan:
    """With reductions of so many bytes."""

    def sized(instr: Instr) -> Instr:
        part = instr.parts[0]
        return replace(instr, parts=(replace(part, reads=("sum",)),)) if isinstance(part.op, AllReduce) else instr

    roles = tuple(replace(role, program=tuple(map(sized, role.program))) for role in plan.roles)
    return replace(plan, roles=roles, values={**plan.values, "sum": Value("sum", TensorSpec((nbytes,), "uint8"), "activation")})


def waits(rng: Random, build: PlanBuilder, role: int, own: str) -> tuple[tuple[str, int], ...]:
    streams = dict.fromkeys(i.stream for i in build.programs[role] if i.stream != own)
    return tuple((s, rng.randint(1, build.count(role, s))) for s in streams if rng.random() < 0.6)


def random_cluster(rng: Random, world: int) -> Cluster:
    """Nodes of a size that need not fit the mesh; some of another kind; slow ranks and links."""
    per_node = rng.randint(1, 5)
    nodes = -(-world // per_node)
    others, links = (), ()
    if nodes > 1 and rng.random() < 0.5:
        first = rng.randrange(nodes)
        others = (Nodes(first, rng.randint(1, nodes - first), FAST),)
    if rng.random() < 0.5:
        ends = {tuple(sorted((rng.randrange(nodes), rng.randrange(nodes)))) for _ in range(rng.randint(1, 2))}
        links = tuple(SlowLink(a, b, rng.choice((2.0, 3.0))) for a, b in sorted(ends))
    slow = {rng.randrange(world): rng.choice((1.5, 2.0)) for _ in range(rng.choice((0, 1, 2)))}
    return replace(
        FLAT, per_node=per_node, nodes=nodes, others=others, slow_links=links, slow_ranks=slow, intra_latency=rng.choice((0.0, 0.25)),
        rails=rng.choice((1, 1, 2)), oversubscription=rng.choice((1.0, 2.0)),
    )  # fmt: skip


def by_rank(plan: Plan) -> Plan:
    """Every rank a role on a mesh of its own, made without what is tested: channels by `Plan.peers`."""
    roles, channels = [], {}
    for rank in range(plan.mesh.world):
        role = plan.role_of(rank)

        def on(instr: Instr, rank: int = rank, role: RolePlan = role) -> Instr:
            op = instr.parts[0].op
            if not isinstance(op, COMM):
                return instr
            old = plan.channel(op.channel)
            members = plan.peers(old, rank)
            name = f"{old.id}:{members}"
            streams = tuple(old.stream_on(plan.role_of(m).role) for m in members)
            ends = tuple(f"rank{m}" for m in members)
            channels[name] = Channel(name, old.kind, ends, streams, (), old.purpose)
            return replace(instr, parts=(replace(instr.parts[0], op=replace(op, channel=name)),))

        roles.append(replace(role, role=f"rank{rank}", placed={"pp": rank}, ranks=(rank,), program=tuple(map(on, role.program))))
    return replace(plan, mesh=Mesh(pp=plan.mesh.world), roles=tuple(roles), channels=tuple(channels.values()))


def times(s: Simulation) -> list[tuple[int, str, float, float, float]]:
    return [(x.rank, x.name, x.start, x.end, x.ready) for x in s.trace.spans]


@settings(max_examples=100)
@given(seed=st.integers(0, 1 << 30), contention=st.booleans())
def test_a_split_simulation_is_that_of_all_ranks(seed: int, contention: bool) -> None:
    rng = Random(seed)
    plan = random_work(rng)
    cluster = random_cluster(rng, plan.mesh.world)
    found = simulate(plan, cluster, contention=contention)
    for every in (simulate(by_rank(plan), cluster, contention=contention), simulate(each_rank(plan).plan, cluster, contention=contention)):
        assert [t[:2] for t in times(found)] == [t[:2] for t in times(every)]
        a, b = ([*s.bubble_s, s.step_s, *(x for t in times(s) for x in t[2:])] for s in (found, every))
        if contention:
            assert a == pytest.approx(b, rel=1e-9, abs=1e-9)
            assert found.period_s == pytest.approx(every.period_s, rel=1e-6)
        else:
            assert a == b and found.period_s == every.period_s
