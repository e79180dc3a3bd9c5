"""Roles split by what differs: the same times as if every rank were a role of its own, at the cost of the classes."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.simulator.tests.toys import beside, changed, toy
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import Channel, Instr, Plan, RolePlan, Value
from piper_ir.program.ops import COMM, Collective
from piper_ir.program.program import Chunk, Cost, Kernel
from piper_simulator import Cluster, Simulation, SlowLink, simulate, why
from piper_simulator.contention import flows
from piper_simulator.durations import message_durations
from piper_simulator.durations.instances import axes_of_equal_ranks, parts_of_equal_nodes
from piper_simulator.times import splitting
from piper_simulator.times.splitting import each_rank, refined, split
from tests.helpers.cases import each_case
from tests.helpers.random_plans import PlanBuilder

FLAT = toy(
    "flat", {"float32": 1.0}, 1000.0, 1 << 30, 10.0, 0.0, 2.0, 0.0, per_node=8, nodes=2, sms=100
)
"""1 FLOP/s, 1000 bytes/s of memory, 10 bytes/s per port and 2 per NIC, without latency."""
FAST = changed(
    FLAT,
    name="fast",
    peak_flops={"float32": 2.0},
    intra_bandwidth=30.0,
    inter_bandwidth=3.0,
    memory_bandwidth=500.0,
)


def computed(plan: Plan) -> Plan:
    """With kernels that take as long on FLAT in place of given durations."""

    def chunk(c: Chunk) -> Chunk:
        cost = Cost(
            (Kernel("matmul", (1, 1, 1), "float32", int(c.steps["F"].cost.seconds or 0), 0),)
        )
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
        if kind < 0.5 or (p == 1 and kind < 0.8):
            role = rng.randrange(p)
            build.compute(role, float(rng.randint(1, 9)), waits(rng, build, role, "compute"))
        elif kind < 0.8:
            a, b = rng.sample(range(p), 2)
            name = f"{a}>{b}"
            build.transfer(
                a,
                b,
                waits(rng, build, a, name),
                waits(rng, build, b, name),
                nbytes=rng.choice((0, 10, 40)),
            )
        else:
            members = tuple(sorted(rng.sample(range(p), rng.randint(1, p))))
            name = "=".join(map(str, members))
            build.all_reduce(members, {m: waits(rng, build, m, name) for m in members})
    overs = ((), ("dp",), ("tp",), ("dp", "tp"))
    channels = {
        c.id: replace(c, over=rng.choice(overs)) if c.kind == "group" else c
        for c in build.channels.values()
    }
    plan = computed(build.plan())
    return on_mesh(
        reducing(plan, rng.choice((0, 24))),
        Mesh(pp=p, dp=rng.randint(1, 4), tp=rng.randint(1, 3)),
        channels,
    )


def reducing(plan: Plan, nbytes: int) -> Plan:
    """Return a plan with reductions of so many bytes."""

    def sized(instr: Instr) -> Instr:
        part = instr.parts[0]
        return (
            replace(instr, parts=(replace(part, reads=("sum",)),))
            if isinstance(part.op, Collective)
            else instr
        )

    roles = tuple(replace(role, program=tuple(map(sized, role.program))) for role in plan.roles)
    return replace(
        plan,
        roles=roles,
        values={**plan.values, "sum": Value("sum", TensorSpec((nbytes,), "uint8"), "activation")},
    )


def waits(rng: Random, build: PlanBuilder, role: int, own: str) -> tuple[tuple[str, int], ...]:
    streams = dict.fromkeys(i.stream for i in build.programs[role] if i.stream != own)
    return tuple((s, rng.randint(1, build.count(role, s))) for s in streams if rng.random() < 0.6)


def random_cluster(rng: Random, world: int) -> Cluster:
    """Nodes of a size that need not fit the mesh; some of another kind; slow ranks and links."""
    per_node = rng.randint(1, 5)
    nodes = -(-world // per_node)
    others: tuple[int, int] | None = None
    links: tuple[SlowLink, ...] = ()
    if nodes > 1 and rng.random() < 0.5:
        first = rng.randrange(nodes)
        others = first, rng.randint(1, nodes - first)
    if rng.random() < 0.5:
        ends = {
            tuple(sorted((rng.randrange(nodes), rng.randrange(nodes))))
            for _ in range(rng.randint(1, 2))
        }
        links = tuple(SlowLink(a, b, rng.choice((2.0, 3.0))) for a, b in sorted(ends))
    slow = {rng.randrange(world): rng.choice((1.5, 2.0)) for _ in range(rng.choice((0, 1, 2)))}
    on = changed(
        FLAT, per_node=per_node, nodes=nodes, slow_links=links, slow_ranks=slow,
        intra_latency=rng.choice((0.0, 0.25)), rails=rng.choice((1, 1, 2)), oversubscription=rng.choice((1.0, 2.0)),
    )  # fmt: skip
    return beside(on, *others, FAST) if others else on


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

        roles.append(
            replace(
                role,
                role=f"rank{rank}",
                placed={"pp": rank},
                ranks=(rank,),
                program=tuple(map(on, role.program)),
            )
        )
    return replace(
        plan, mesh=Mesh(pp=plan.mesh.world), roles=tuple(roles), channels=tuple(channels.values())
    )


def times(s: Simulation) -> list[tuple[int, str, float, float, float]]:
    return [(x.rank, x.name, x.start, x.end, x.ready) for x in s.trace.spans]


@settings(max_examples=50)
@given(seed=st.integers(0, 1 << 30), contention=st.booleans())
def test_a_split_simulation_is_that_of_all_ranks(seed: int, contention: bool) -> None:
    rng = Random(seed)
    plan = random_work(rng)
    cluster = random_cluster(rng, plan.mesh.world)
    found = simulate(plan, cluster, contention=contention)
    for every in (
        simulate(by_rank(plan), cluster, contention=contention),
        simulate(each_rank(plan).plan, cluster, contention=contention),
    ):
        assert [t[:2] for t in times(found)] == [t[:2] for t in times(every)]
        a, b = (
            [*s.bubble_s, s.step_s, *(x for t in times(s) for x in t[2:])] for s in (found, every)
        )
        if contention:
            assert a == pytest.approx(b, rel=1e-9, abs=1e-9)
            assert found.period_s == pytest.approx(every.period_s, rel=1e-6)
        else:
            assert a == b and found.period_s == every.period_s


@settings(max_examples=30)
@given(seed=st.integers(0, 1 << 30))
def test_equal_nodes_change_nothing_when_each_is_looked_at(seed: int) -> None:
    """Compare results with and without the knowledge that nodes are equal: they are the same to the bit."""
    rng = Random(seed)
    plan = random_work(rng)
    mesh = plan.mesh
    replicas = mesh.size("tp") * mesh.size("dp")
    per_node = rng.choice([n for n in range(1, 9) if replicas % n == 0])
    nodes, rails = mesh.world // per_node, rng.choice((1, 2, per_node))
    cluster = changed(FLAT, per_node=per_node, nodes=nodes, rails=rails, oversubscription=2.0)
    found = simulate(plan, cluster)
    with pytest.MonkeyPatch.context() as patch:
        for module in (flows, message_durations):
            patch.setattr(module, "parts_of_equal_nodes", lambda plan, cluster: ())
        patch.setattr(splitting, "axes_of_equal_ranks", lambda plan, cluster: frozenset())
        every = simulate(plan, cluster)
    if per_node % mesh.size("tp") == 0 or per_node == 1:
        free = {axis for axis in mesh.axes if axis != "pp"}
        assert parts_of_equal_nodes(plan, cluster) or "dp" not in free
        assert axes_of_equal_ranks(plan, cluster) == free
    assert found._run.parts.role_of == every._run.parts.role_of
    assert found._run.durations == every._run.durations
    assert times(found) == times(every)


def replicas(dp: int, *, on: Cluster = FLAT, nbytes: int = 0) -> Plan:
    """Two stages of 3 and 2 s, a transfer between them, and a reduction of each over dp at the end."""
    build = PlanBuilder(2, dp=dp)
    build.compute(0, 3.0, name="a")
    build.transfer(0, 1, waits=(("compute", 1),), nbytes=nbytes)
    build.compute(1, 2.0, waits=(("0>1", 1),), name="b")
    build.all_reduce((0,), {0: (("compute", 1),)})
    build.all_reduce((1,), {1: (("compute", 1),)})
    return computed(build.plan())


@each_case(
    "dp, tp, per_node, parts",
    [
        (16, 1, 8, (("dp", 8, 2),)),
        (4, 2, 2, (("tp", 2, 1), ("dp", 2, 4))),
        (4, 3, 4, ()),  # nodes begin at other places of the groups of three
        (4, 3, 2, ()),
    ],
)
def test_an_axis_that_fills_nodes_has_equal_nodes(
    dp: int, tp: int, per_node: int, parts: tuple[object, ...]
) -> None:
    plan, cluster = replicas(1), changed(FLAT, per_node=per_node, nodes=2 * dp * tp // per_node)
    on = on_mesh(plan, Mesh(pp=2, dp=dp, tp=tp), {c.id: c for c in plan.channels})
    assert parts_of_equal_nodes(on, cluster) == parts


def starts(s: Simulation, name: str) -> list[float]:
    return [x.start for x in s.trace.spans if x.name == name]


def test_a_slow_rank_delays_its_own_pipeline_until_the_reduction() -> None:
    """dp=8: rank 2 takes 6 s for the 3 s of stage 0. Only the stage after it waits; then all wait for the
    reductions."""
    s = simulate(replicas(8), changed(FLAT, slow_ranks={2: 2.0}))
    assert starts(s, "b") == [3.0, 3.0, 6.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    assert (starts(s, "0.reduce"), starts(s, "1.reduce")) == ([6.0] * 8, [8.0] * 8)
    assert s.step_s == 8.0 and s.bubble_s[:3] == (5.0, 5.0, 2.0)
    assert s.notes == ("slow ranks: rank 2 of pp0/2, 2 times as long",)


def test_a_slow_link_delays_who_sends_over_it() -> None:
    """Four replicas, a rank per node: stage 0 on nodes 0 to 3, stage 1 on 4 to 7. 20 bytes at 2 bytes/s, on one link
    thrice."""
    on = changed(FLAT, per_node=1, nodes=8, slow_links=(SlowLink(1, 5, 3.0),))
    s = simulate(replicas(4, nbytes=20), on)
    assert starts(s, "b") == [13.0, 33.0, 13.0, 13.0]


def test_which_link_an_instance_crosses() -> None:
    """Nodes of 3 and two replicas of two stages: the transfer of rank 0 to 2 stays on node 0, that of 1 to 3 does
    not."""
    s = simulate(replicas(2, nbytes=20), changed(FLAT, per_node=3))
    assert starts(s, "b") == [5.0, 13.0]


def test_two_kinds_of_devices() -> None:
    """pp across types: stage 1 is on the fast node. dp across types: only half of the ranks are fast."""
    mixed = beside(FLAT, 1, 1, FAST)
    s = simulate(replicas(8), mixed)
    assert (starts(s, "1.reduce"), s.step_s) == ([4.0] * 8, 4.0)
    across = simulate(replicas(4), beside(changed(FLAT, per_node=2, nodes=4), 1, 1, FAST))
    assert (starts(across, "b"), across.step_s) == ([3.0, 3.0, 1.5, 1.5], 5.0)
    build = PlanBuilder(1, dp=4)
    build.compute(0, 3.0)
    alone = simulate(computed(build.plan()), beside(changed(FLAT, per_node=2, nodes=4), 1, 1, FAST))
    assert [x.end for x in alone.trace.spans] == [3.0, 3.0, 1.5, 1.5], "without a message"


def test_what_is_not_different_is_not_split() -> None:
    plan = replicas(8)
    for cluster in (
        None,
        FLAT,
        beside(FLAT, 1, 1, FAST),
        changed(FLAT, slow_ranks=dict.fromkeys(range(8), 2.0)),
    ):
        for shared in (False, True):
            assert split(plan, cluster, shared=shared and cluster is not None).plan is plan
    beyond = changed(FLAT, per_node=2)
    assert split(plan, beyond, shared=True).plan is plan, (
        "the plan is too large, which is for others to say"
    )


@each_case("dp", [8, 64, 1024])
def test_the_cost_is_that_of_the_classes(dp: int) -> None:
    """A slow rank is alone, and so is the stage after it; it holds up all others alike, however many they are."""
    cluster = changed(FLAT, nodes=2 * dp // 8, slow_ranks={3: 2.0})
    found = split(replicas(dp), cluster, shared=True)
    assert [role.role for role in found.plan.roles] == [
        "pp0/0",
        "pp0/3",
        f"pp1/{dp}",
        f"pp1/{dp + 3}",
    ]
    assert [len(role.ranks) for role in found.plan.roles] == [dp - 1, 1, dp - 1, 1]
    assert found.of == (0, 0, 1, 1) and found.role_of[3] == 1
    assert [(c.id, c.roles) for c in found.plan.channels] == [
        ("0>1/0", ("pp0/0", f"pp1/{dp}")), ("0>1/3", ("pp0/3", f"pp1/{dp + 3}")),
        ("0", ("pp0/0", "pp0/3")), ("1", (f"pp1/{dp}", f"pp1/{dp + 3}")),
    ]  # fmt: skip
    a, b = (role.program[0] for role in found.plan.roles[:2])
    assert a is b, "what computes is one object"


def test_who_else_uses_a_link_matters_with_contention_only() -> None:
    """Nodes of 2, three replicas: the ring of stage 0 passes the NIC of rank 2 as often as those of 0 and 1 together,
    and that of stage 1 the one of 3; each sends to stage 1 over its NIC. 0 meets 3, 1 meets 4 and 2 meets 5."""
    plan, on = replicas(3, nbytes=20), changed(FLAT, per_node=2, nodes=3)
    assert len(split(plan, on, shared=False).plan.roles) == 2
    assert [role.ranks for role in split(plan, on, shared=True).plan.roles] == [
        (rank,) for rank in range(6)
    ]


def test_refinement_on_a_path() -> None:
    """A path of seven nodes: each end sees one neighbour, and the distance from the ends spreads inwards."""
    near = [[n for n in (k - 1, k + 1) if 0 <= n < 7] for k in range(7)]
    colours = refined([0] * 7, near, lambda node, now: tuple(sorted(now[n] for n in near[node])))
    assert [colours[k] == colours[6 - k] for k in range(7)] == [True] * 7 and len(
        set(colours[:4])
    ) == 4


@settings(max_examples=15)
@given(seed=st.integers(0, 1 << 30), contention=st.booleans())
def test_the_explanation_is_that_of_the_split_simulation(seed: int, contention: bool) -> None:
    """Its path fills the step, its roles are all ranks, and what they do adds up."""
    rng = Random(seed)
    plan = random_work(rng)
    cluster = random_cluster(rng, plan.mesh.world)
    found = why(plan, cluster, contention=contention, draws=1)
    s = simulate(plan, cluster, contention=contention)
    assert found.step_s == s.step_s
    assert sum(p.seconds for p in found.path) == pytest.approx(s.step_s)
    assert sorted(rank for role in found.plan.roles for rank in role.ranks) == list(
        range(plan.mesh.world)
    )
    for role, share in zip(found.plan.roles, found.shares, strict=True):
        assert share.bubble + share.waiting + share.host + share.computing == pytest.approx(
            s.step_s
        )
        for rank in role.ranks:
            assert s.step_s - s.bubble_s[rank] == pytest.approx(share.computing)
