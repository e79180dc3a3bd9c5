"""Predictions of experts under a load: its fullest device decides, and a capacity makes it matter not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import piper
from piper import Mesh, Strategy, models, recipes
from piper_ir.ground.errors import PlanError
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Compute
from piper_ir.program.program import Chunk, Cost, Step
from piper_simulator import Cluster, DeviceModel, Zipf, cpu_local, load_cluster, simulate
from piper_simulator.contention.loads import _pieces
from piper_simulator.contention.rates import Flow
from piper_simulator.durations import device_model
from piper_simulator.durations.cost_model import StepMessages
from piper_simulator.durations.expert_loads import mixture_of
from piper_simulator.durations.expert_work import loaded
from piper_simulator.durations.kernels import step_seconds
from piper_simulator.metrics import executed_flops, model_flops
from tests.helpers.large_experts import LARGE, NODES, of_experts
from tests.helpers.steered import CHOICES, DEVICES, WIDTH
from tests.parity.test_dropless_experts import compiled


@cache
def plan_of(capacity: float | None, **more: Any) -> Plan:
    work = models.job(
        LARGE.with_experts(capacity_factor=capacity), global_batch=32, precision="bfloat16"
    )
    shared = (*recipes.expert_parallel(**more), *recipes.data_parallel(over=("ep",)))
    return piper.compile(work, Strategy(Mesh(ep=4), shared)).plan


def test_the_fullest_rank_decides_how_long_dropless_experts_take() -> None:
    """They are a good part of the step. Up to the bound products grow; above it a round follows, with its messages."""
    plan = plan_of(None)
    even, most, above, double = (simulate(plan, NODES, load=x) for x in (None, 1.25, 1.3, 2.0))
    assert (
        even.load is not None
        and even.load.source == "assumed"
        and "not measured: as if all ranks" in even.notes[-1]
    )
    assert even.step_s < most.step_s < above.step_s < double.step_s
    assert even.inside_comm_s == most.inside_comm_s < above.inside_comm_s < double.inside_comm_s
    assert "1.3 times the mean" in above.notes[-2]
    assert (
        "always above their places, 1.25 times the mean: a layer then takes 1 further round"
        in above.notes[-1]
    )
    assert "up to 3 further rounds" in simulate(plan, NODES, load=4).notes[-1]
    uneven = simulate(plan, NODES, load=Zipf(0.6))
    assert uneven.load is not None and 1 < uneven.load.mean < uneven.load.worst
    assert uneven.worst_step_s is not None and even.step_s < uneven.step_s < uneven.worst_step_s
    with pytest.raises(PlanError, match=r"load=4.5: from 1 .* to 4 \(one of 4 has them all\)"):
        simulate(plan, NODES, load=4.5)


@pytest.mark.long
def test_no_stack_hides_the_messages_of_experts() -> None:
    """Userbuffers run the messages of attention beside its products. The host launches each message."""
    sizes = (*recipes.tensor_parallel(sequence=True), *recipes.expert_parallel(hidden="tp"))
    shared = (*sizes, *recipes.data_parallel(over=("ep",)))
    plan = piper.compile(models.job(LARGE, global_batch=2), Strategy(Mesh(ep=2, tp=2), shared)).plan
    hiding = load_cluster("h100x4@hopper-nemo")
    stack = hiding.device.stack
    assert stack is not None
    none = replace(stack.constants["hidden"], value=0.0, low=0.0)
    stack = replace(stack, constants={**stack.constants, "hidden": none})
    role, cost = plan.roles[0], hiding.device.launch_s
    beside, after = (
        DeviceModel(plan, cluster, None)
        for cluster in (hiding, hiding.each_device(lambda d: replace(d, stack=stack)))
    )
    found: dict[bool, set[bool]] = {True: set(), False: set()}
    for instr in role.program:
        ops = [p.op for p in instr.parts if isinstance(p.op, Compute)]
        assert beside.work(role, instr).seconds <= after.work(role, instr).seconds
        for op in ops:
            less, more = (model._with_messages(role, op, 0) for model in (beside, after))
            count = sum(m.count for m in less.inside)
            assert less.launch_s - beside._steps[op, 0].launch_s == pytest.approx(count * cost)
            if any("tp" in m.axis for m in less.inside):
                experts = plan.chunk(op.variant).steps[op.step].experts is not None
                found[experts].add(less.seconds < more.seconds)
    assert found == {True: {False}, False: {True}}


def test_a_prediction_is_the_mean_over_the_loads() -> None:
    """Half of the cases are even and half need a round: so do half of the layers, though the mean load is within the
    bound."""
    plan = plan_of(None)

    def took(*loads: tuple[float, float]) -> tuple[float, float]:
        model = DeviceModel(plan, NODES, None, loads)
        works = [
            model.work(plan.roles[0], i) for i in plan.roles[0].program if i.stream == "compute"
        ]
        return sum(w.seconds for w in works), sum(w.inside_s for w in works)

    even, full, both = took((1.0, 1.0)), took((1.4, 1.0)), took((1.0, 0.5), (1.4, 0.5))
    assert (
        both == pytest.approx([(a + b) / 2 for a, b in zip(even, full, strict=True)])
        and both[0] > took((1.2, 1.0))[0]
    )


def test_launches_are_the_mean_over_the_loads() -> None:
    """A further round launches the experts' kernels again, in the cases that need one."""
    plan = plan_of(None)

    def launched(*loads: tuple[float, float]) -> float:
        model = DeviceModel(plan, NODES, None, loads)
        return model._formula(NODES.device, of_experts(plan), "I", 0)[0].launch_s

    even, round_more = launched((1.0, 1.0)), launched((1.4, 1.0))
    assert even < round_more
    assert launched((1.0, 0.9), (1.4, 0.1)) == pytest.approx(0.9 * even + 0.1 * round_more)


def test_messages_of_rare_further_rounds_share_links_as_others_do() -> None:
    """The weights' gradients exchange in further rounds alone, which here one case of ten needs."""
    plan = plan_of(None)
    (role,) = plan.roles
    instr = next(
        i for i in role.program if any(p.op == Compute(of_experts(plan).id, "W") for p in i.parts)
    )
    alone = replace(
        instr, parts=tuple(p for p in instr.parts if p.op == Compute(of_experts(plan).id, "W"))
    )
    work = DeviceModel(plan, NODES, None, ((1.0, 0.9), (1.4, 0.1))).work(role, alone)
    (inside,) = work.inside
    assert inside.count == 1 and 0 < inside.seconds < work.seconds
    assert sum(
        seconds for seconds, _ in _pieces(work, [Flow(0, inside.seconds, {}, 1.0)])
    ) == pytest.approx(work.seconds)


def test_messages_are_of_all_places_on_any_device() -> None:
    plan = compiled("uniform", Mesh(ep=DEVICES)).plan
    (role,) = plan.roles
    instr = next(
        i for i in role.program if any(p.op == Compute(of_experts(plan).id, "F") for p in i.parts)
    )
    alone = replace(
        instr, parts=tuple(p for p in instr.parts if p.op == Compute(of_experts(plan).id, "F"))
    )
    nbytes = (
        2 * CHOICES * WIDTH * 8
    )  # of the rows that a device has on average, there and back, in float64

    def sent(cluster: Cluster, load: float) -> StepMessages:
        work = DeviceModel(plan, cluster, None, ((load, 1.0),)).work(role, alone)
        return next(m for m in work.inside if m.op == "all_to_all")

    for cluster in (cpu_local(), NODES):
        even, more = (sent(cluster, load) for load in (1.0, 1.2))
        assert even == more and even.bytes == round(1.25 * nbytes)


def test_rows_without_a_place_take_no_time_where_no_round_follows() -> None:
    plan = plan_of(None, overflow="drop")
    most, above = (simulate(plan, NODES, load=x) for x in (1.25, 3.0))
    assert above.step_s == most.step_s and "overflow='drop' leaves others out" in above.notes[-1]


@pytest.mark.long
def test_a_load_changes_no_time_of_experts_with_a_capacity() -> None:
    """They compute and send all their places, whatever tokens choose."""
    plan = plan_of(1.25)
    even, uneven = (simulate(plan, NODES, load=x) for x in (None, Zipf(0.6)))
    assert uneven.step_s == even.step_s and uneven.worst_step_s is None
    assert "each computes all its places, so that no time depends on it" in uneven.notes[-1]


def test_dropless_experts_are_known_by_what_their_steps_exchange() -> None:
    found = mixture_of(plan_of(None))
    assert found is not None and found.bound == pytest.approx(1.25, rel=0.01)
    assert (found.experts, found.ranks, found.choices, found.tokens) == (
        8,
        4,
        4 * 8 * 512 * 2,
        4 * 8 * 512,
    )
    assert found.rounds and not found.padded
    dropped = mixture_of(plan_of(None, overflow="drop"))
    assert dropped is not None and not dropped.rounds and dropped.bound == found.bound


def test_a_plan_that_says_nothing_of_rows_is_of_no_load() -> None:
    """Plans of earlier versions do not."""
    plan, old = plan_of(None), []
    for chunk in plan.chunks:
        steps = {step: replace(sig, experts=None) for step, sig in chunk.steps.items()}
        old.append(replace(chunk, steps=steps))
    found = simulate(replace(plan, chunks=tuple(old)), NODES, load=2.0)
    assert found.step_s > simulate(plan, NODES).step_s
    assert "of all their places, whatever the load; compile it again" in found.notes[-1]
    with pytest.raises(PlanError, match=r"to 4 \(one of 4 has them all\)"):
        simulate(replace(plan, chunks=tuple(old)), NODES, load=5)


def test_model_flops_are_the_same_however_devices_share_experts() -> None:
    """Devices that cut each expert gather the rows of all of them: a device's rows are of more tokens."""
    folded = recipes.expert_parallel(over=("tp", "ep"))
    found = set()
    for cut in (folded, recipes.expert_parallel(hidden="tp")):
        replicas = recipes.data_parallel(over=("ep",), zero=1)
        directives = (*recipes.tensor_parallel(sequence=True), *cut, *replicas)
        made = piper.compile(
            models.job(LARGE, global_batch=8), Strategy(Mesh(tp=2, ep=2), directives)
        )
        found.add(model_flops(made.plan, LARGE.length))
        mixture = mixture_of(made.plan)
        assert mixture is not None and mixture.choices == 2 * mixture.tokens
    assert len(found) == 1


def test_places_without_rows_count_in_no_flops() -> None:
    """One device and four devices count the same FLOPs of a dropless mixture; a token visits 2 of 8 experts."""
    alone = piper.compile(
        models.job(LARGE, global_batch=32, precision="bfloat16"), Strategy(Mesh(), ())
    ).plan
    shared = plan_of(None)
    assert model_flops(shared, 512) == model_flops(alone, 512)
    assert executed_flops(shared) == pytest.approx(executed_flops(alone), rel=0.01)


@pytest.mark.long
def test_a_runs_log_serves_predictions_of_dropless_experts(tmp_path: Path) -> None:
    small = replace(LARGE, width=16, length=8).with_experts(hidden=24)
    shared = (*recipes.expert_parallel(), *recipes.data_parallel(over=("ep",)))
    made = piper.compile(
        models.job(small, global_batch=8, precision="float32"), Strategy(Mesh(ep=2), shared)
    )
    piper.execute(made, steps=2, launcher="inline", folder=tmp_path)
    found = simulate(made.plan, "h100x2", load=tmp_path)
    assert (
        found.load is not None
        and found.load.source == "measured"
        and 1 <= found.load.mean <= found.load.worst <= 2
    )
    assert not any("not measured" in note for note in found.notes)


def test_a_measured_step_takes_longer_as_its_formula_does() -> None:
    plan = plan_of(None)
    even, double = (DeviceModel(plan, NODES, None, ((load, 1.0),)) for load in (1.0, 2.0))
    chunk = of_experts(plan)
    assert even._longer(chunk, "F", 0) == 1.0
    assert double._longer(chunk, "F", 0) == pytest.approx(_took(double, chunk) / _took(even, chunk))
    other = next(c for c in plan.chunks if not c.experts)
    assert double._longer(other, "F", 0) == 1.0


def test_measured_steps_of_equal_layers_are_scaled_by_one_calculation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loads of a run may be hundreds, and each is a calculation of its own."""
    calls: list[float] = []

    def counted(chunk: Chunk, step: Step, load: float, **how: bool) -> Cost:
        calls.append(load)
        return loaded(chunk, step, load, **how)

    monkeypatch.setattr(device_model, "loaded", counted)
    model = DeviceModel(plan_of(None), NODES, None, tuple((1 + k / 100, 0.01) for k in range(100)))
    for most in (101, 1):  # the loads and the even one, which alone is not kept
        calls.clear()
        assert model._longer(of_experts(model.plan), "F", 0) > 1 and len(calls) == most


def _took(model: DeviceModel, chunk: Chunk) -> float:
    return step_seconds(NODES.device, loaded(chunk, "F", model.loads[0][0]), "F")
