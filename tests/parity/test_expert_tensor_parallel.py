"""Devices that cut each expert of a dropless mixture, beside others with other experts, train what one device trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import piper
from piper import Mesh, Strategy, models, recipes, where
from piper.api.captures import capturing
from piper.api.reference.verification import verify_strategy
from piper_capture.store import experts
from piper_capture.store.expert_cuts import Cuts, cuts_of
from piper_ir.ground.errors import DirectiveError, PlanError
from piper_ir.plan.plan import Plan
from piper_ir.program.layout import DimPart
from piper_ir.verify import verify
from piper_simulator import simulate
from tests.helpers import parity
from tests.helpers.cases import each_case
from tests.helpers.decoders import DECODERS
from tests.helpers.memory_judge import lies
from tests.helpers.slow_devices import slow_devices
from tests.helpers.steered import EXPERTS, HIDDEN, TOKENS, TOP, WIDTH, Steered, SteeredMixture
from tests.parity.test_dropless_experts import expected, job, run, shared
from tests.parity.test_experts_and_tokens import CONTEXT, SEQUENCE

ROWS = ("dp", "ep")
BLOCKS = piper.shard(where(), over="cp", index="tokens", order="blocks")
CUT: dict[str, tuple[Mesh, dict[str, Any], tuple[Any, ...], tuple[str, ...], int]] = {
    "tp": (Mesh(tp=2, ep=2), {"hidden": "tp"}, (SEQUENCE,), ROWS, 0),
    "replicas": (Mesh(etp=2, ep=2), {"hidden": "etp"}, (), ("ep", "etp"), 0),
    "cp, of a degree other than tp": (
        Mesh(tp=2, cp=4), {"hidden": "cp", "over": "tp"}, (SEQUENCE, BLOCKS), ROWS, 0,
    ),
    "tp and replicas, zero 1": (Mesh(tp=2, etp=2, ep=2), {"hidden": ("tp", "etp")}, (SEQUENCE,), ("ep", "etp"), 1),
    "zero 3 over cp": (Mesh(cp=2, ep=2, dp=2), {"hidden": "cp"}, (CONTEXT,), (*ROWS, "cp"), 3),
}  # fmt: skip


def strategy(name: str, **more: Any) -> Strategy:
    mesh, experts, directives, rows, zero = CUT[name]
    rest = recipes.data_parallel(over=rows, zero=zero)
    return Strategy(mesh, [shared(**experts, **more), *directives, *rest])


@pytest.mark.parametrize("load", ["2", "all to one"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n not in ("tp", "replicas"))) for n in CUT]
)
def test_experts_that_devices_cut(name: str, load: str) -> None:
    made = piper.compile(job(load), strategy(name))
    verify(made.plan)
    found = run(made)
    parity.assert_parity(found, expected(load, made.plan.replicas, made.plan.microbatches))
    assert not lies(made.plan, found.memory)


def test_shares_of_another_dtype_than_the_rows() -> None:
    """A router computes its probabilities in float32, as Mixtral's does."""
    made = replace(job("2"), model=in_float32)
    compiled = piper.compile(made, strategy("replicas"))
    found = run(compiled)
    plan = compiled.plan
    judge = parity.reference(made, replicas=plan.replicas, microbatches=plan.microbatches, steps=2)
    parity.assert_parity(found, judge, 1e-6)
    assert not lies(plan, found.memory)


def in_float32() -> SteeredMixture:
    model = SteeredMixture("2")
    for layer in model.layers:
        assert isinstance(layer, Steered)
        layer.shares = torch.float32
    return model


def plan() -> Plan:
    return piper.compile(job("2"), strategy("replicas")).plan


def test_a_device_has_a_part_of_its_experts_and_the_rows_of_all_who_cut_them() -> None:
    made = plan()
    params = {p.name: p for p in made.params}
    assert params["layers.0.up"].layout == (DimPart("ep", 0), DimPart("etp", 2))
    assert params["layers.0.down"].layout == (DimPart("ep", 0), DimPart("etp", 1))
    assert params["layers.0.up"].spec.shape == (EXPERTS // 2, WIDTH, HIDDEN // 2)
    assert made.experts == ("etp", "ep") and {c.experts for c in made.chunks} == {"", "ep"}
    steps = next(c for c in made.chunks if c.experts).steps
    assert steps["F"].experts is not None
    assert steps["F"].experts.rows == 2 * made.rows * TOKENS * TOP
    inside = [(c.kind, c.axis) for c in steps["F"].collectives if not c.further]
    assert inside == [
        ("all_gather", "ep"), ("all_gather", "etp"),  # the counts
        ("all_to_all", "ep"), ("all_gather", "etp"), ("reduce_scatter", "etp"), ("all_to_all", "ep"),
    ]  # fmt: skip
    further = [(c.kind, c.axis) for c in steps["F"].collectives if c.further]
    assert further == inside[2:]


def test_messages_of_devices_that_cut_experts_take_time() -> None:
    """Beside two axes of experts, which exchange as many rows, the gathers and scatters come on top."""
    cut, whole = (
        simulate(
            piper.compile(job("2"), Strategy(Mesh(etp=2, ep=2), [shared(**how), *rows])).plan,
            slow_devices("h100x4"),
        )
        for how in ({"hidden": "etp"}, {"over": ("etp", "ep")})
        for rows in (recipes.data_parallel(over=("ep", "etp")),)
    )
    assert cut.period_s > whole.period_s


def test_negative_control_sums_that_are_not_made_are_found() -> None:
    made = plan()
    chunks = []
    for chunk in made.chunks:
        sig = chunk.steps["F"]
        kept = tuple(c for c in sig.collectives if c.kind != "reduce_scatter")
        steps = {**chunk.steps, "F": replace(sig, collectives=kept)}
        chunks.append(replace(chunk, steps=steps) if chunk.experts else chunk)
    with pytest.raises(PlanError, match="along etp, too, and its step F adds nothing up along it"):
        verify(replace(made, chunks=tuple(chunks)))


@each_case(
    ("how", "mesh", "more", "message"),
    [
        ({"hidden": "xx"}, Mesh(tp=2, ep=2), (SEQUENCE,), r"hidden='xx'; .* are accepted.*condition 15"),
        ({"hidden": "ep"}, Mesh(tp=2, ep=2), (SEQUENCE,), r"over='ep', hidden='ep': .* name it once.*condition 15"),
        ({"hidden": "tp"}, Mesh(tp=2), (SEQUENCE,), r"has no ep, so that no rows are exchanged.*condition 15"),
        ({"hidden": "tp"}, Mesh(tp=2, ep=2), (piper.shard(where()),), r"hidden='tp': devices along tp have the same tok"),
        ({"hidden": "etp"}, Mesh(etp=5, ep=2), (), "5 devices cannot cut the experts of .*5 devices cannot share 12 evenly"),
    ],
)  # fmt: skip
def test_experts_that_devices_cannot_cut_are_refused(
    how: dict[str, Any], mesh: Mesh, more: Any, message: str
) -> None:
    rows = recipes.data_parallel(over=("ep", *(["etp"] if mesh.size("etp") > 1 else [])))
    with pytest.raises(DirectiveError, match=message):
        piper.compile(job("2"), Strategy(mesh, [shared(**how), *more, *rows]))


def test_only_exchanged_experts_are_cut() -> None:
    with pytest.raises(DirectiveError, match=r"use stream=.rows., or leave it out.*condition 15"):
        piper.compile(job("2"), Strategy(Mesh(tp=2), [piper.shard(where(), hidden="tp")]))


def decoder(name: str) -> tuple[piper.Job, Strategy]:
    work = models.job(DECODERS[name], global_batch=8, precision="float64", lr=0.01)
    directives = [
        *recipes.expert_parallel(hidden="tp"), *recipes.tensor_parallel(sequence=True),
        *recipes.one_f_one_b(pp=2, microbatches=2), *recipes.data_parallel(over=("ep",), zero=1),
    ]  # fmt: skip
    return work, Strategy(Mesh(tp=2, ep=2, pp=2), directives)


@pytest.mark.long
@pytest.mark.parametrize("name", ["Qwen2-MoE", "GPT-OSS"])
def test_experts_of_decoders_that_devices_cut(name: str) -> None:
    """Gated experts beside shared ones, and experts with biases."""
    assert verify_strategy(*decoder(name), steps=2).equal


@pytest.mark.long
def test_negative_control_a_bias_is_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(*args: Any) -> Cuts:
        found = cuts_of(*args)
        assert isinstance(found, Cuts) and found.divided
        return replace(found, divided=())

    monkeypatch.setattr(experts, "cuts_of", whole)
    monkeypatch.setattr(capturing, "_CAPTURES", {})  # the experts of a kept capture are cut already
    assert not verify_strategy(*decoder("GPT-OSS"), steps=2).equal
