"""Protect the simulated time of ordered messages, of whole and hybrid parameters, of a scaled loss, and of ranks that
draw."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import piper
from piper import Mesh, Precision, Strategy, models, order, recipes, where
from piper.models import GPTConfig
from piper_ir.ground.trace import Trace
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Recv, Send
from piper_simulator import STACKS, DeviceModel, load_cluster, with_stack
from piper_simulator.durations.instances import meeting_inside
from tests.helpers.slow_devices import slow_devices

SIZES = GPTConfig(layers=6, width=64, heads=2, vocab=64, length=16)
ONE_NODE, TWO_NODES = slow_devices("h100x4"), slow_devices("h100x4*2")


def plan_of(
    *directives: object,
    mesh: Mesh | None = None,
    precision: Precision | None = None,
    **states: object,
) -> Plan:
    """Return the plan of two microbatches on two nodes of four devices, unless a mesh says otherwise."""
    job = models.job(SIZES, global_batch=16, precision=precision)
    shared = recipes.data_parallel(**{"bucket_mb": 0.01, **states})  # type: ignore[arg-type]  # as given by tests
    split = piper.split(where(), microbatches=2)
    return piper.compile(job, Strategy(mesh or Mesh(dp=8), (split, *shared, *directives))).plan


def simulated(plan: Plan) -> tuple[float, Trace]:
    found = piper.simulate(plan, TWO_NODES if plan.mesh.world == 8 else ONE_NODE)
    return found.step_s, found.trace


def seconds(trace: Trace, kind: str) -> float:
    """Return how long the first rank's messages of a kind take, one after the other."""
    return sum(
        s.end - s.start
        for s in trace.spans
        if s.rank == 0 and s.name.startswith((f"{kind}.", f"{kind}#"))
    )


@pytest.mark.parametrize("op", ["reduce", "gather"])
def test_a_message_that_an_order_moves_behind_compute_is_exposed(op: str) -> None:
    """Reductions wait for all of backward; the first layer waits for the last one's parameters, gathered before."""
    if op == "reduce":
        usual, moved = (), (order(where(phase="B"), where(op="reduce")),)
        states: dict[str, object] = {"zero": 1}
    else:  # a bucket of parameters for each layer
        usual = (piper.partition(SIZES.layers),)
        moved = (*usual, order(*(where(op="gather", layer=k) for k in (5, 4, 3, 2, 1, 0))))
        states = {"zero": 2, "bucket_mb": 1.0}
    early, late = (simulated(plan_of(*more, **states))[0] for more in (usual, moved))
    assert late > 1.01 * early


def test_parameters_that_stay_whole_are_not_gathered() -> None:
    """A plan with all parameters whole takes as long under zero=3 as under zero=2."""
    cut, some, all_, two = (
        simulated(plan_of(**how))
        for how in (
            {"zero": 3},
            {"zero": 3, "whole_mb": 0.02},
            {"zero": 3, "whole_mb": 1.0},
            {"zero": 2},
        )
    )
    gathers = [seconds(trace, "gather") for _, trace in (cut, some, all_)]
    assert gathers[0] > gathers[1] > gathers[2] > 0
    assert all_[0] == pytest.approx(two[0], rel=1e-9) and all_[0] < cut[0]


def test_hybrid_sharding_gathers_inside_of_a_node() -> None:
    """Gathers among the four devices of a node take less than among all, or among four devices of both nodes."""
    states = dict.fromkeys(("optim", "grads", "params"), "dp")
    node, apart = (
        simulated(plan_of(mesh=Mesh(dp=4, rep=2, order=order), over=("dp", "rep"), shard=states))
        for order in ((), ("rep", "dp"))
    )
    whole = simulated(plan_of(zero=3))
    gathers = [seconds(trace, "gather") for _, trace in (node, apart, whole)]
    assert gathers[0] < 0.8 * gathers[1] and gathers[0] < 0.8 * gathers[2]
    assert node[0] < min(apart[0], whole[0])


def test_a_scaled_loss_costs_a_norm_of_the_gradients_and_no_time_of_layers() -> None:
    """Each step has to know whether gradients of any rank overflow, as with clip_norm. The last layer has the loss."""
    half, scaled = (
        simulated(plan_of(zero=2, precision=Precision("float32", compute, "float32")))
        for compute in ("bfloat16", "float16")
    )

    def layers(trace: Trace) -> float:
        return sum(s.end - s.start for s in trace.spans if re.match("layer[0-4]", s.name))

    assert layers(scaled[1]) == pytest.approx(layers(half[1]), rel=1e-6)
    longer = scaled[0] - half[0]
    assert seconds(half[1], "norm") == 0.0 < seconds(scaled[1], "norm") < 1.01 * longer


def test_without_jitter_every_rank_has_its_host() -> None:
    """Ranks that draw are roles of their own, each with the launches of the one that they come from."""
    sizes = models.DecoderConfig(layers=1, width=8, heads=2, hidden=8, vocab=8, length=4)
    job = models.job(sizes, global_batch=4, length=4)
    plan = piper.compile(job, Strategy(Mesh(dp=2), [*recipes.data_parallel()])).plan
    found = piper.simulate(plan, "h100x2")
    assert found.distribution(0, repetitions=2).step_s.median == pytest.approx(found.step_s)
    assert found.distribution(0.1, repetitions=9).step_s.std > 0


@pytest.mark.parametrize("cut_along_tokens", [False, True])
def test_software_sends_a_tensor_that_all_devices_have_in_parts(cut_along_tokens: bool) -> None:
    """Four devices send a quarter each, and gather the whole; where tokens are cut, each has a quarter anyway."""
    job = models.job(GPTConfig(layers=4, width=64, heads=4, vocab=64, length=64), global_batch=8)
    stages = recipes.one_f_one_b(pp=2, microbatches=4)
    shared = recipes.tensor_parallel(sequence=cut_along_tokens)
    plan = piper.compile(job, Strategy(Mesh(pp=2, tp=4), (*shared, *stages))).plan
    cluster = slow_devices("h100x4*2")
    found = {}
    for transfers in ("whole", "parts"):
        stack = replace(STACKS["eager"], transfers=transfers)
        model = DeviceModel(plan, with_stack(cluster, stack), None)
        instrs = [(role, i) for role in plan.roles for i in role.program]
        sent = [i for i in instrs if isinstance(i[1].parts[0].op, Send | Recv)]
        found[transfers] = {model.work(*one) for one in sent}
    whole, parts = found["whole"], found["parts"]
    if cut_along_tokens:
        assert parts == whole
        return
    (one,), (part,) = whole, parts
    assert part.bytes == one.bytes // 4
    alone = DeviceModel(plan, cluster, None)
    channel = meeting_inside(plan, "tp", plan.roles[1])
    gathered = alone._messages.work(channel, "all_gather", one.bytes).seconds
    assert part.seconds < one.seconds + gathered and part.seconds > gathered > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("cluster", "sent"), [("h100x4", 0.875), ("h100x2*2", 0.75)])
def test_a_token_goes_once_to_each_node_of_its_experts(cluster: str, sent: float) -> None:
    """Two choices fall on 4 (1 - (3/4)^2) of four devices on average, or on 2 (1 - (1/2)^2) of two nodes."""
    experts = models.Experts(number=8, top_k=2, hidden=64)
    config = models.LlamaConfig(
        layers=1, width=64, heads=4, hidden=64, vocab=64, length=64, experts=experts
    )
    states = piper.replicate(where(), over="ep")
    shared = (*recipes.expert_parallel(over="ep", bound=1.0), states)
    plan = piper.compile(models.job(config, global_batch=4), Strategy(Mesh(ep=4), shared)).plan
    found = {}
    for dispatch in ("copies", "once"):
        stack = replace(STACKS["eager"], dispatch=dispatch)
        model = DeviceModel(plan, with_stack(load_cluster(cluster), stack), None)
        role = plan.roles[0]
        works = [model.work(role, instr) for instr in role.program]
        found[dispatch] = sum(m.bytes for w in works for m in w.inside if m.op == "all_to_all")
    assert found["once"] / found["copies"] == pytest.approx(sent, rel=0.01)
