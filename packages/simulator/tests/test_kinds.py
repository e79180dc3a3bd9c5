"""Two types of devices in one mesh: times, memory, rates and what-if, each rank by its own device."""

from dataclasses import replace
from pathlib import Path

import pytest

from packages.simulator.tests.toys import beside, changed
from piper_compiler import Strategy, compile_program, recipes, synthetic
from piper_ir.ground.errors import ClusterError
from piper_ir.ground.mesh import Mesh
from piper_ir.plan.plan import Plan
from piper_ir.program.costs import Costs, Duration, Origin
from piper_ir.program.program import Chunk, Cost, Kernel
from piper_simulator import Cluster, DeviceModel, SlowLink, load_cluster, simulate, why
from piper_simulator.durations.communication import by_formula, duration, rank_group
from piper_simulator.explanation.whatif import cluster_constants
from tests.helpers.random_plans import PlanBuilder

MIXED = load_cluster("a100x4+h100x4*2")
A100, H100 = load_cluster("a100x4"), load_cluster("h100x4*2")
GIB = 1 << 30


def test_names() -> None:
    assert MIXED.name == "a100-80g-sxm:4+h100-80g-sxm:4*2"
    assert load_cluster("h100x8+a100x8@eager").name == "h100-80g-sxm:8+a100-80g-sxm:8@eager"
    assert load_cluster(MIXED.name) == MIXED
    assert (
        load_cluster("h100x4+h100x4").name == "h100-80g-sxm:4*2"
        and len(load_cluster("h100x4+h100x4").kinds) == 1
    )
    assert [k.device.name for k in MIXED.kinds] == ["a100-80g-sxm", "h100-80g-sxm"]
    assert [MIXED.of(rank).name[:4] for rank in (0, 3, 4, 11)] == ["a100", "a100", "h100", "h100"]
    for wrong in ("a100x8+", "a100x8+h900x8", "a100x8@eager+h100x8", "h100x8@"):
        with pytest.raises(ClusterError, match="unknown cluster"):
            load_cluster(wrong)
    with pytest.raises(ClusterError, match="8 devices per node of h100-80g-sxm and 4 of a100"):
        load_cluster("a100x4+h100x8")


def test_what_cannot_be_beside_each_other() -> None:
    with pytest.raises(ClusterError, match="nodes: none stand here; at least one is needed"):
        replace(H100, nodes=())
    with pytest.raises(
        ClusterError, match=r"nodes\[1\]: 0 stands here; a whole number from 1 on is needed"
    ):
        replace(H100, nodes=((1, H100.device), (0, A100.device)))
    with pytest.raises(
        ClusterError,
        match="links: 2 of them for 3 runs of nodes; one for all, or one for each, is needed",
    ):
        replace(H100, nodes=((1, H100.device),) * 3, network=MIXED.network)
    with pytest.raises(ClusterError, match="devices beside a CPU"):
        beside(H100, 0, 1, load_cluster("cpu-local"))


def test_messages_between_two_types_take_what_the_slower_one_takes() -> None:
    near, far, between = (
        rank_group(MIXED, (0, 1)),
        rank_group(MIXED, (4, 8)),
        rank_group(MIXED, (3, 4)),
    )
    assert between.kinds == (0, 1)
    assert by_formula(MIXED, "p2p", 1e9, near) == by_formula(
        A100, "p2p", 1e9, rank_group(A100, (0, 1))
    )
    assert by_formula(MIXED, "p2p", 1e9, far) == by_formula(
        H100, "p2p", 1e9, rank_group(H100, (0, 4))
    )
    assert by_formula(MIXED, "p2p", 1e9, between) == pytest.approx(4e-6 + 1 / 23.5), "an A100's NIC"
    ring = by_formula(MIXED, "all_reduce", 1e9, rank_group(MIXED, range(8)))
    assert ring == by_formula(
        load_cluster("a100x4*2"), "all_reduce", 1e9, rank_group(H100, range(8))
    )


def test_a_table_holds_for_its_own_type() -> None:
    both = load_cluster("h100x8+a100-40gx8")
    assert duration(both, "all_reduce", 1 << 20, rank_group(both, range(8, 16))).source in (
        "table",
        "interpolated",
    )
    assert duration(both, "all_reduce", 1 << 20, rank_group(both, range(8))).source == "formula"
    assert duration(both, "all_reduce", 1 << 20, rank_group(both, range(16))).source == "formula"


def pipeline(dp: int = 4, nbytes: int = 0) -> Plan:
    """Two stages of 1e12 FLOPs in bfloat16 on each of dp replicas; with states of so many bytes."""
    program = synthetic(stages=2, F=1.0, I=1.0, W=1.0, params=nbytes)
    made = (*recipes.gpipe(pp=2, microbatches=2), *recipes.data_parallel(over=("dp",)))
    plan = compile_program(program, Strategy(Mesh(pp=2, dp=dp), made)).plan
    return replace(plan, chunks=tuple(map(computed, plan.chunks)))


def computed(chunk: Chunk) -> Chunk:
    cost = Cost((Kernel("matmul", (1, 1, 1), "bfloat16", 10**12, 0),))
    return replace(chunk, steps={k: replace(s, cost=cost) for k, s in chunk.steps.items()})


def test_stages_on_two_types() -> None:
    """Stage 0 on the A100s, stage 1 on H100s: each computes at its own peak; both steps of a role count."""
    s = simulate(pipeline(), MIXED, contention=False)
    busy = [s.step_s - idle for idle in s.bubble_s]
    each = [6e12 / (k.device.peak("bfloat16") * k.device.matmul_fraction) for k in (A100, H100)]
    assert busy[:4] == pytest.approx([each[0]] * 4, rel=3e-3)
    assert busy[4:] == pytest.approx([each[1]] * 4, rel=3e-3)


def test_a_stack_without_a_number_for_a_device_says_so(tmp_path: Path) -> None:
    """FlashAttention-2 has numbers of Ampere and Hopper: on Blackwell attention counts as a matrix product."""
    kernel = Kernel("attention", (8, 16, 1024, 1024, 128), "bfloat16", 10**12, 0, lowering="flash")
    plan = pipeline()
    attention = {k: replace(s, cost=Cost((kernel,))) for k, s in plan.chunks[0].steps.items()}
    asked = replace(plan, chunks=(replace(plan.chunks[0], steps=attention), *plan.chunks[1:]))
    said = "the stack eager has no number for its attention kernel flash-2 on blackwell devices"
    found = {
        name: [n for n in simulate(asked, name).notes if "no number" in n]
        for name in ("b200x8@eager", "h100x8@eager", "b200x8")
    }
    assert len(found["b200x8@eager"]) == 1 and said in found["b200x8@eager"][0]
    assert found["h100x8@eager"] == found["b200x8"] == [], (
        "it has one there; without a stack no kernel has numbers of its own"
    )
    assert not any("no number" in note for note in simulate(plan, "b200x8@eager").notes), (
        "no attention runs"
    )
    file = tmp_path / "own.toml"
    file.write_text(
        'device = "a100-80g-sxm"\nstack = "liger"\nnodes = { devices = 8 }\n[attention.flash-3]\nsource = "arXiv '
        '2407.08608"\nhopper = [0.75, 0.6]\n[stacks.liger]\nattention = "flash-3"\nlowering = "one '
        'kernel"\noptimizer = "fused"\nfused = []\nsaved = "all"\noverlap = []\nsource = "here"\n'
    )
    assert [n for n in simulate(asked, load_cluster(file)).notes if "no number" in n] == [
        "a100-80g-sxm: the stack liger has no number for its attention kernel flash-3 on ampere "
        "devices; attention counts as a matrix product"
    ]


def test_utilisation_is_of_the_sum_of_peaks() -> None:
    s = simulate(pipeline(), MIXED)
    flops = 4 * 2 * 6e12
    assert s.hfu == pytest.approx(flops / s.period_s / (4 * 312e12 + 4 * 989e12))
    assert MIXED.peak_of(8, "bfloat16") == pytest.approx(4 * 312e12 + 4 * 989e12)


def test_memory_is_that_of_each_ranks_own_device() -> None:
    small = changed(A100, context_bytes=7 * GIB, allocator_factor=1.5)
    mixed = Cluster.joined((small, H100))
    s, plain = (
        simulate(pipeline(nbytes=GIB), mixed),
        simulate(pipeline(nbytes=GIB), load_cluster("h100x4*3")),
    )
    assert s.peak_bytes == plain.peak_bytes and s.device_bytes[4:] == plain.device_bytes[4:]
    communicators = (
        plain.device_bytes[0]
        - H100.device.context_bytes
        - round(plain.peak_bytes[0] * H100.device.allocator_factor)
    )
    assert s.device_bytes[0] == 7 * GIB + round(s.peak_bytes[0] * 1.5) + communicators
    assert [mixed.of(rank).memory_bytes for rank in (0, 11)] == [
        A100.device.memory_bytes,
        H100.device.memory_bytes,
    ]


def test_costs_hold_for_the_type_on_which_they_were_taken() -> None:
    plan = pipeline()
    origin = Origin(
        "an H100",
        "h100-80g-sxm:1",
        "nccl",
        "processes",
        8,
        1,
        "3",
        "2",
        plan.program_key,
        "2026-11-20",
        3,
    )
    steps = {c.id: {k: Duration(1.0) for k in c.steps} for c in plan.chunks}
    model = DeviceModel(plan, MIXED, Costs(compute=steps, origin=origin))
    computes = [[model.work(r, i) for i in r.program if not i.comm] for r in plan.roles]
    assert [any(w.source == "measured" for w in of) for of in computes] == [False, True]
    elsewhere = DeviceModel(
        plan, MIXED, Costs(compute=steps, origin=replace(origin, cluster="b200-sxm:1"))
    )
    computes = [[elsewhere.work(r, i) for i in r.program if not i.comm] for r in plan.roles]
    assert [any(w.source == "measured" for w in of) for of in computes] == [True, True]


def test_what_if_and_sensitivities_reach_every_type() -> None:
    plan, slow = pipeline(), changed(MIXED, slow_ranks={1: 1.5, 2: 1.5})
    found = why(plan, slow)
    by_name = {w.name: w.step_s for w in found.what_if}
    faster = slow.each_device(
        lambda d: replace(d, peak_flops={k: 2 * v for k, v in d.peak_flops.items()})
    )
    assert by_name["twice the peak FLOP/s"] == pytest.approx(simulate(plan, faster).step_s)
    assert found.step_s == pytest.approx(simulate(plan, slow).step_s)
    parts = {s.name: s.per_percent for s in found.sensitivities}
    for name in ("peak_flops[bfloat16]", "h100-80g-sxm.peak_flops[bfloat16]"):
        assert parts[name] < -0.05, "the path goes through both stages"
    assert parts["slow_ranks[1.5]"] > 0.1
    for name, value, put in cluster_constants(slow):
        assert put(value) == slow, name
    assert [len(role.ranks) for role in found.plan.roles] == [2, 2, 2, 2]
    assert sum(p.seconds for p in found.path) == pytest.approx(found.step_s)


def test_the_step_is_sensitive_to_the_slow_links_that_it_waits_for() -> None:
    """Ranks 0 and 1 reduce over a slow link, 2 and 3 over a slower one; nobody crosses the third."""
    plan, one = pipeline(dp=2, nbytes=1 << 28), load_cluster("h100x1*5")
    links = {SlowLink(0, 1, 2.0): False, SlowLink(2, 3, 8.0): True, SlowLink(3, 4, 9.0): False}
    slow = changed(one, slow_links=tuple(links))
    found = why(plan, slow)
    parts = {s.name: s.per_percent for s in found.sensitivities}
    for link, matters in links.items():
        more = changed(
            slow,
            slow_links=tuple(replace(x, factor=1.01 * x.factor) if x == link else x for x in links),
        )
        percent = (simulate(plan, more).step_s / found.step_s - 1) * 100
        assert (percent > 0.1) is matters
        assert parts.get(f"slow_links[{link.factor:g}]", 0.0) == pytest.approx(percent, rel=0.05)
    for name, value, put in cluster_constants(slow):
        assert put(value) == slow, name


def test_a_role_of_two_types_takes_as_long_as_the_slower_one() -> None:
    """For those who time a plan that is not split, such as a search."""
    build = PlanBuilder(1, dp=12)
    build.compute(0, 1.0)
    plan = replace(build.plan(), chunks=tuple(map(computed, build.plan().chunks)))
    role = plan.roles[0]
    assert DeviceModel(plan, MIXED, None).work(role, role.program[0]).seconds == pytest.approx(
        1e12 / (312e12 * A100.device.matmul_fraction)
    )
