"""The device model: each formula by hand, and the order in which durations are looked for."""

from dataclasses import replace
from typing import Any

import pytest

from packages.simulator.tests.toys import changed, toy
from piper_compiler import Strategy, Training, compile_program, recipes, synthetic
from piper_ir.ground.errors import ClusterError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import Bucket, Channel, Instr, Part, Plan, RolePlan, State, Value
from piper_ir.program.costs import CommDuration, Costs, Duration
from piper_ir.program.ops import Add, Collective, Compute, Op, Recv, Send, SquaredNorm, Update
from piper_ir.program.program import Chunk, Cost, Kernel, Signature
from piper_simulator import Cluster, DeviceModel, SlowLink, Work, model_for
from piper_simulator.cluster.kernel_table import KernelDuration
from piper_simulator.cluster.stacks import STACKS
from piper_simulator.durations.updates import Updated, update_bytes, update_seconds
from tests.helpers.cases import each_case

MACHINE = toy(
    name="toy",
    peak_flops={"float32": 1000.0, "float64": 500.0},
    memory_bandwidth=100.0,
    memory_bytes=1 << 20,
    intra_bandwidth=10.0,
    intra_latency=1.0,
    inter_bandwidth=2.0,
    inter_latency=3.0,
    per_node=4,
    nodes=4,
    matmul_fraction=0.5,
    memory_fraction=0.8,
    launch_s=0.25,
    host_issue_s=0.125,
)
MATMUL = Kernel("matmul", (1, 1, 1), "float32", flops=2000, bytes=8)
ADD = Kernel("elementwise", (), "float32", flops=10, bytes=160, count=3)


def reduction(channel: str, bucket: str = "") -> Collective:
    return Collective("all_reduce", channel, bucket)


def chunk(id: str, *kernels: Kernel, seconds: float | None = None) -> Chunk:
    return Chunk(id, {}, (), (), {}, {"F": Signature((), (), cost=Cost(kernels, seconds))})


def plan(*chunks: Chunk, mesh: Mesh | None = None, over: tuple[str, ...] = ()) -> Plan:
    """Two roles on the axis pp, a channel between them, one over both and one over `over` on the first."""
    mesh = mesh or Mesh(pp=2)
    roles = tuple(
        RolePlan(
            f"pp{r}",
            {"pp": r},
            mesh.ranks({"pp": r}),
            (),
            (),
            (State("param", "b", 40, True), State("optim", "b", 80, True)),
        )
        for r in range(2)
    )
    channels = (
        Channel("p2p", "p2p", ("pp0", "pp1"), ("s", "s")),
        Channel("both", "group", ("pp0", "pp1"), ("g", "g")),
        Channel("dp", "group", ("pp0",), ("d",), over, "reduce"),
    )
    buckets = (Bucket("b", ("w",), (0,), 20, "float32", ("pp0",)),)
    values = {
        v: Value(v, TensorSpec((n,), "uint8"), "activation")
        for v, n in (("u", 40), ("v", 40), ("s", 40))
    }
    return Plan("k", mesh, 4, 1, over, roles, channels, buckets, values, chunks)


def work(
    p: Plan,
    op: Op,
    *,
    on: Cluster | None = MACHINE,
    costs: Costs | None = None,
    reads: tuple[str, ...] = ("u",),
) -> Work:
    writes = ("v",) if isinstance(op, Recv | Add) else ()
    instr = Instr("x", (Part("node", op, reads=reads, writes=writes),))
    return DeviceModel(p, on, costs).work(p.roles[0], instr)


def seconds(p: Plan, op: Op, **more: Any) -> float:
    return work(p, op, **more).seconds


CAPTURED = plan(chunk("c", MATMUL, ADD), chunk("tiny", replace(ADD, bytes=1, count=8)))


def test_compute_is_the_larger_of_flops_and_bytes_per_kernel() -> None:
    """matmul: 2000 / (1000 x 0.5) = 4 s; three times 160 bytes / (100 x 0.8) = 6 s."""
    assert seconds(CAPTURED, Compute("c", "F")) == 4.0 + 6.0


def test_launches_are_beside_the_kernels() -> None:
    found = work(CAPTURED, Compute("tiny", "F"))
    assert (found.seconds, found.launch_s) == (pytest.approx(8 * 1 / 80), 8 * 0.25)
    measured = Costs({"tiny": {"F": Duration(1.0, "measured")}})
    assert work(CAPTURED, Compute("tiny", "F"), costs=measured).launch_s == 0, "measured with them"


def test_launches_and_issue_add_up_where_the_host_is_the_device() -> None:
    cpu = changed(MACHINE, synchronous=True)
    assert seconds(CAPTURED, Compute("c", "F"), on=cpu) == 4.0 + 6.0 + 4 * 0.25 + 0.125
    assert DeviceModel(CAPTURED, cpu, None).issue_s == 0.0
    assert DeviceModel(CAPTURED, MACHINE, None).issue_s == 0.125


def test_the_kernels_of_a_graph_wait_for_no_launch_and_its_instructions_share_one() -> None:
    """Three instructions: each is issued in a third of the host's time for one."""
    program = tuple(Instr("compute", (Part(name, Compute("c", "F")),)) for name in "abc")
    first = replace(CAPTURED.roles[0], program=program)
    graphed = replace(CAPTURED, roles=(first, *CAPTURED.roles[1:]), cuda_graph=True)
    many_launches = changed(MACHINE, launch_s=100.0)
    for of, launch_s in ((CAPTURED, 4 * 100.0), (graphed, 0.0)):
        found = work(of, Compute("c", "F"), on=many_launches)
        assert (found.seconds, found.launch_s) == (4.0 + 6.0, launch_s)
    assert DeviceModel(graphed, MACHINE, None).issue_s == 0.125 / 3
    with pytest.raises(ClusterError, match="toy is no CUDA device"):
        DeviceModel(graphed, changed(MACHINE, synchronous=True), None)


def test_an_instruction_of_several_parts_takes_their_sum_and_the_least_trusted_label() -> None:
    parts = (Part("a", Compute("c", "F")), Part("b", Compute("tiny", "F")))
    costs = Costs({"c": {"F": Duration(1.0, "measured")}})
    found = DeviceModel(CAPTURED, MACHINE, costs).work(CAPTURED.roles[0], Instr("compute", parts))
    assert (found.seconds, found.source) == (pytest.approx(1.0 + 0.1), "formula")
    assert (found.launch_s, found.flops) == (8 * 0.25, 2000 + 30 + 80)


def test_memory_ops_move_their_bytes() -> None:
    rate = 100 * 0.8
    assert seconds(CAPTURED, Add(), reads=("u", "s")) == 120 / rate
    assert seconds(CAPTURED, SquaredNorm(("b",), "float32"), reads=()) == 80 / rate
    assert seconds(CAPTURED, Update(("b",)), reads=()) == 2 * (40 + 80) / rate, (
        "the bucket's gradient is no state of this role"
    )


def test_with_a_stack_an_update_is_what_its_optimizer_launches() -> None:
    """Bucket b: 40 bytes of parameters, 80 of states, no gradient on this role."""
    of = Updated(40, 0, 80, 4, 1, False)
    for name, tensors in (("eager", 2 * 40 + 2 * 80), ("inductor", 20 * 40)):
        stack = changed(MACHINE, stack=STACKS[name], launch_s=0.0)
        assert sum(update_bytes(of, fused=name == "eager")) == tensors
        assert seconds(CAPTURED, Update(("b",)), on=stack, reads=()) == pytest.approx(tensors / 80)
    on = changed(MACHINE, stack=STACKS["eager"])
    scaled = work(CAPTURED, Update(("b",), clip=1.0), on=on, reads=())
    assert (scaled.seconds, scaled.launch_s) == pytest.approx(
        update_seconds(on.device, replace(of, scaled=True))
    )


def test_measured_kernels_label_a_step_and_are_said() -> None:
    """7 s of the product are measured; an addition took 2 s at twice its bytes, half of the formula's 4: half of its
    own 2."""
    rows = (
        KernelDuration("matmul", "", "float32", "shape", (1, 1, 1), 7.0, "here"),
        KernelDuration("elementwise", "", "float32", "bytes", (320,), 2.0, "here"),
    )
    some = changed(MACHINE, kernels=rows)
    model = DeviceModel(CAPTURED, some, None)
    found = model.work(CAPTURED.roles[0], Instr("x", (Part("node", Compute("c", "F")),)))
    assert (found.seconds, found.source) == (pytest.approx(7.0 + 3 * 1.0), "formula")
    (note,) = [n for n in model.notes if "kernels" in n]
    assert note.startswith(
        f"{some.name}: of the time of kernels 70% as measured, 30% up to 2 times outside of them, by formula"
    )
    twice = plan(chunk("c", MATMUL, ADD), chunk("d", MATMUL))
    model = DeviceModel(twice, some, None)
    for name in ("c", "d", "c"):
        model.work(twice.roles[0], Instr("x", (Part("node", Compute(name, "F")),)))
    assert any("82% as measured, 18%" in n for n in model.notes), (
        "7 + 7 of 17 s, each step of a chunk once"
    )
    exact = changed(some, kernels=(rows[0], replace(rows[1], size=(160,))))
    found = DeviceModel(CAPTURED, exact, None).work(
        CAPTURED.roles[0], Instr("x", (Part("node", Compute("c", "F")),))
    )
    assert (found.seconds, found.source) == (7.0 + 3 * 2.0, "table")
    assert not any("kernels" in n for n in DeviceModel(CAPTURED, MACHINE, None).notes)


def test_point_to_point() -> None:
    assert seconds(CAPTURED, Send("p2p")) == seconds(CAPTURED, Recv("p2p")) == 1.0 + 40 / 10
    apart = plan(
        chunk("c", MATMUL), mesh=Mesh(pp=2, dp=4)
    )  # ranks 0..3 on one node, 4..7 on the next
    assert seconds(apart, Send("p2p")) == 3.0 + 40 / 2


def test_all_reduce_is_a_ring() -> None:
    """n = 2: 2 hops and 2 (n - 1) / n = 1 times the bytes."""
    assert seconds(CAPTURED, reduction("both")) == 2 * 1.0 + 40 / 10
    four = plan(chunk("c", MATMUL), mesh=Mesh(pp=2, dp=4), over=("dp",))
    assert seconds(four, reduction("dp")) == 6 * 1.0 + 1.5 * 40 / 10
    assert seconds(four, reduction("dp", "b")) == 6 * 1.0 + 1.5 * 80 / 10, "a bucket of 20 floats"


def test_all_reduce_over_nodes_shares_the_nics_of_a_node() -> None:
    """8 ranks on 2 nodes: 4 NICs of 2 bytes/s each; 14 hops, 2 of them between nodes."""
    eight = plan(chunk("c", MATMUL), mesh=Mesh(pp=2, dp=8), over=("dp",))
    assert seconds(eight, reduction("dp")) == 12 * 1.0 + 2 * 3.0 + 1.75 * 40 / 8
    spread = plan(chunk("c", MATMUL), mesh=Mesh(pp=2, dp=4), over=("dp",))
    one_per_node = changed(MACHINE, per_node=1, nodes=8)
    assert seconds(spread, reduction("dp"), on=one_per_node) == 6 * 3.0 + 1.5 * 40 / 2


def test_the_slowest_instance_of_a_channel_gives_its_time() -> None:
    """Pairs of ranks 0 and 2, 1 and 3, on four nodes: one of the two links is slow."""
    pairs = plan(chunk("c", MATMUL), mesh=Mesh(pp=2, dp=2))
    apart = changed(MACHINE, per_node=1, nodes=8)
    assert seconds(pairs, Send("p2p"), on=apart) == 3.0 + 40 / 2
    assert (
        seconds(pairs, Send("p2p"), on=changed(apart, slow_links=(SlowLink(1, 3, 2.0),)))
        == 3.0 + 40 / 1
    )
    assert (
        seconds(pairs, Send("p2p"), on=changed(apart, slow_links=(SlowLink(0, 1, 2.0),)))
        == 3.0 + 40 / 2
    ), "not theirs"


def test_a_measured_message_over_a_slow_link_takes_longer_as_its_formula_does() -> None:
    """Ranks 0 and 2, 1 and 3, each on a node of its own: 3 + 40 / 2 s by formula, 3 + 40 / 0.5 over the slow link."""
    pairs = plan(chunk("c", MATMUL), mesh=Mesh(pp=2, dp=2))
    apart = changed(MACHINE, per_node=1, nodes=4)
    costs = Costs(comm=(CommDuration("p2p", 40, 2, Duration(9.0), nodes=2),))
    assert seconds(pairs, Send("p2p"), on=apart, costs=costs) == 9.0
    for link, factor in ((SlowLink(1, 3, 4.0), 83 / 23), (SlowLink(0, 1, 4.0), 1.0)):
        assert seconds(
            pairs, Send("p2p"), on=changed(apart, slow_links=(link,)), costs=costs
        ) == pytest.approx(9.0 * factor)


def test_slow_links_that_messages_cross_are_named() -> None:
    pairs = plan(chunk("c", MATMUL), mesh=Mesh(pp=2, dp=2))
    links = (
        SlowLink(1, 3, 2.0),
        SlowLink(0, 1, 3.0),
        SlowLink(1, 1, 4.0),
    )  # ranks 0 and 2, 1 and 3 are pairs
    for per_node, named in (
        (1, ("slow links: nodes 1 and 3, 2 times as long",)),
        (2, ("slow links: nodes 0 and 1, 3 times as long",)),
    ):
        model = DeviceModel(
            pairs, changed(MACHINE, per_node=per_node, nodes=4, slow_links=links), None
        )
        model.work(pairs.roles[0], Instr("s", (Part("n", Send("p2p"), reads=("u",)),)))
        assert model.notes == named
    model = DeviceModel(CAPTURED, changed(MACHINE, slow_links=(SlowLink(0, 0, 2.0),)), None)
    model.work(CAPTURED.roles[0], Instr("g", (Part("n", reduction("both"), reads=("u",)),)))
    assert model.notes == ("slow links: within node 0, 2 times as long",)


def test_a_role_takes_as_long_as_its_slowest_rank() -> None:
    on = changed(MACHINE, slow_ranks={1: 1.5, 2: 3.0})
    four = plan(chunk("c", MATMUL, ADD), mesh=Mesh(pp=2, dp=2))  # the first role has ranks 0 and 1
    model = DeviceModel(four, on, None)
    first, second = (
        model.work(r, Instr("compute", (Part("a", Compute("c", "F")),))) for r in four.roles
    )
    assert (first.seconds, second.seconds) == (10.0 * 1.5, 10.0 * 3.0)
    assert first.flops == second.flops and seconds(four, Send("p2p"), on=on) == seconds(
        four, Send("p2p")
    )
    assert model.notes == (
        "slow ranks: rank 1 of pp0, 1.5 times as long, rank 2 of pp1, 3 times as long",
    )


def test_a_message_from_the_cluster_s_table_is_labelled_so() -> None:
    on = changed(MACHINE, messages=(CommDuration("all_reduce", 40, 2, Duration(0.5, "table")),))
    work = DeviceModel(CAPTURED, on, None).work(
        CAPTURED.roles[0], Instr("g", (Part("n", reduction("both"), reads=("u",)),))
    )
    assert (work.seconds, work.source, work.bytes) == (0.5, "table", 40)
    measured = Costs(comm=(CommDuration("all_reduce", 40, 2, Duration(0.25)),))
    assert seconds(CAPTURED, reduction("both"), on=on, costs=measured) == 0.25, (
        "what was measured here comes first"
    )


def test_an_all_reduce_of_one_rank_takes_no_time() -> None:
    assert seconds(CAPTURED, reduction("dp")) == 0.0


def test_costs_come_before_the_formula_and_after_given_durations() -> None:
    costs = Costs(
        {"c": {"F": Duration(7.0)}, "g": {"F": Duration(7.0)}},
        (CommDuration("p2p", 40, 2, Duration(9.0, "table")),),
    )
    mixed = plan(chunk("c", MATMUL), chunk("g", seconds=5.0))
    assert seconds(mixed, Compute("c", "F"), costs=costs) == 7.0
    assert seconds(mixed, Compute("g", "F"), costs=costs) == 5.0
    assert seconds(mixed, Send("p2p"), costs=costs) == 9.0
    assert seconds(mixed, reduction("both"), costs=costs) == 2.0 + 4.0, "not in the costs: computed"


def test_given_durations_are_all_there_is_in_a_synthetic_plan() -> None:
    given = plan(chunk("g", seconds=5.0))
    for on in (None, MACHINE):
        assert seconds(given, Compute("g", "F"), on=on) == 5.0
        assert [
            seconds(given, op, on=on)
            for op in (Send("p2p"), reduction("both"), Add(), Update(("b",)))
        ] == [0.0] * 4
        assert DeviceModel(given, on, None).issue_s == 0.0


@each_case("op", [Compute("c", "F"), Send("p2p"), Add()])
def test_without_a_cluster_a_duration_that_must_be_computed_is_refused(op: Op) -> None:
    with pytest.raises(ClusterError, match="name a cluster to simulate on"):
        seconds(CAPTURED, op, on=None)


def test_a_cluster_that_is_too_small_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"the plan runs on 2 ranks; toy:1 has 1 devices"):
        model_for(CAPTURED, changed(MACHINE, per_node=1, nodes=1), None, DeviceModel)


def test_costs_of_another_microbatch_are_refused() -> None:
    costs = Costs({"c": {"F": Duration(1.0)}}, rows=8)
    with pytest.raises(
        ClusterError, match="the costs hold for 8 rows per microbatch; the plan has 4"
    ):
        DeviceModel(CAPTURED, MACHINE, costs)
    DeviceModel(replace(CAPTURED, rows=8), MACHINE, costs)


def test_an_update_of_a_compiled_plan_moves_parameters_gradients_and_optimizer_state() -> None:
    """1024 bytes of parameters and of gradients, 4096 of optimizer state, read and written; one bucket holds them."""
    program = synthetic(stages=1, F=1, I=1, W=1, params=1024)
    (only,) = program.chunks
    steps = {s: replace(sig, cost=Cost((MATMUL,))) for s, sig in only.steps.items()}
    program = replace(program, chunks=(replace(only, steps=steps),), source="captured")
    compiled = compile_program(
        program,
        Strategy(Mesh(), recipes.gpipe(pp=1, microbatches=1)),
        training=Training(state_bytes=lambda bucket: 4096),
    )
    role = compiled.plan.roles[0]
    held = sum(s.nbytes for s in role.states if s.category in ("param", "grad", "optim"))
    assert held == 1024 + 1024 + 4096
    (instr,) = [i for i in role.program if any(isinstance(p.op, Update) for p in i.parts)]
    (update,) = [p for p in instr.parts if isinstance(p.op, Update)]
    work = DeviceModel(compiled.plan, MACHINE, None).work(role, replace(instr, parts=(update,)))
    read = sum(compiled.plan.values[v].nbytes for v in update.reads)
    assert work.seconds == pytest.approx((2 * held + read) / (100 * 0.8))


def test_a_guessed_rate_and_uncalibrated_constants_are_noted() -> None:
    model = DeviceModel(
        plan(chunk("c", replace(MATMUL, dtype="int8"))),
        changed(MACHINE, notes="not calibrated"),
        None,
    )
    assert model.notes == ("toy:4*4: not calibrated",)
    instr = Instr("compute", (Part("a", Compute("c", "F")),))
    model.work(model.plan.roles[0], instr)
    assert model.notes[1:] == (
        "toy:4*4: no FLOP/s known for int8; computed with those of float64, 5e-10 TFLOP/s",
    )
    for kernel in (
        MATMUL,
        replace(ADD, dtype="int64"),
    ):  # a known dtype; an unknown one whose rate decides nothing
        model = DeviceModel(plan(chunk("c", kernel)), MACHINE, None)
        model.work(model.plan.roles[0], instr)
        assert model.notes == ()
