"""Protect shared experts beside the exchange of rows: where they stand, that they train one model, what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest

import piper
from piper import Mesh, Strategy, models, recipes
from piper.api.compiling.compiling import Compiled
from piper.views.explained.exchanges import exchanges
from piper_capture.steps import joint
from piper_ir.ground.errors import DirectiveError
from piper_ir.program.program import Signature
from piper_ir.verify import verify
from piper_simulator import simulate
from tests.helpers import parity
from tests.helpers.memory_judge import lies
from tests.helpers.slow_devices import slow_devices

EXPERTS = models.Experts(number=4, top_k=2, hidden=24, shared_hidden=24, shared_within=True)
CONFIG = models.DecoderConfig(
    layers=1, width=16, heads=4, kv_heads=2, head_dim=6, hidden=24, vocab=32, length=8, experts=EXPERTS
)  # fmt: skip

PAIR = Mesh(ep=2)


@cache
def job(experts: models.Experts = EXPERTS) -> piper.Job:
    config = replace(CONFIG, experts=experts)
    return models.job(config, global_batch=8, precision="float64", lr=0.01, clip_norm=0.05)


def compiled(made: piper.Job, mesh: Mesh = PAIR, *more: object, beside: bool = True) -> Compiled:
    over = ("tp", "ep") if mesh.size("tp") > 1 else "ep"
    cut = "etp" if mesh.size("etp") > 1 else ""
    shared = recipes.expert_parallel(over=over, beside=beside, hidden=cut)
    replicas = recipes.data_parallel(over=("dp", "ep", *["etp"] * bool(cut)))
    return piper.compile(made, Strategy(mesh, (*more, *shared, *replicas)))


def steps(made: Compiled) -> dict[str, Signature]:
    return dict(next(c for c in made.plan.chunks if c.experts).steps)


def products(sig: Signature) -> list[tuple[int, int]]:
    """Return the collectives with products beside them, each with their number."""
    counts = [
        (o.number, sum(k.count for k in o.beside.kernels if k.kind == "matmul"))
        for o in sig.overlaps
    ]
    return [(number, n) for number, n in counts if n]


def test_the_shared_expert_is_computed_while_rows_travel() -> None:
    """Two of its three products while rows go to experts, as long as they have more FLOPs than one, and the last while
    they come back, as Megatron-LM does it; in the backward likewise. Without `beside` nothing is."""
    made = compiled(job())
    verify(made.plan)
    found = steps(made)
    assert [c.kind for c in found["F"].collectives[:3]] == ["all_gather", *2 * ["all_to_all"]]
    assert products(found["F"]) == [(1, 2), (2, 1)] and products(found["I"])
    usual = steps(compiled(job(), beside=False))
    assert not any(sig.overlaps for sig in usual.values())
    assert found["F"].cost.flops == usual["F"].cost.flops
    on = slow_devices("h100x8")
    whole = simulate(compiled(job(), beside=False).plan, on, contention=False).step_s
    assert simulate(made.plan, on, contention=False).step_s < whole
    assert "2 all_to_all of 20 KiB (2 beside compute)" in exchanges(made.plan)


@pytest.mark.parametrize(
    ("mesh", "launcher"),
    [
        (Mesh(ep=2), "inline"),
        (
            Mesh(ep=2, etp=2),
            "inline",
        ),  # an exchange whose operand is the result of another collective
        pytest.param(Mesh(ep=2), "processes", marks=pytest.mark.long),
        pytest.param(Mesh(tp=2, ep=2), "inline", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_one_device_trains_the_same(mesh: Mesh, launcher: str) -> None:
    tensor = recipes.tensor_parallel(sequence=True, pieces=2) if mesh.size("tp") > 1 else ()
    made = compiled(job(), mesh, *tensor)
    found = piper.execute(made, steps=2, launcher=launcher, gradients=True)
    one = parity.reference(
        job(), replicas=made.plan.replicas, microbatches=made.plan.microbatches, steps=2
    )
    parity.assert_parity(found, one)
    assert not lies(made.plan, found.memory)


@pytest.mark.long
def test_negative_control_operations_that_stay_in_their_order_are_seen() -> None:
    other = replace(EXPERTS, shared_hidden=32)
    with (
        patch.object(joint, "fill", lambda step: None),
        pytest.raises(DirectiveError, match="computes nothing beside its experts"),
    ):
        compiled(job(other))


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (replace(EXPERTS, shared_within=False), "computes nothing beside its experts; put shared"),
        pytest.param(
            models.Experts(number=4, top_k=2, hidden=24, capacity_factor=1.0),
            "has a capacity",
            marks=pytest.mark.long,
        ),
    ],
)
def test_regions_with_nothing_beside_are_refused(experts: models.Experts, message: str) -> None:
    with pytest.raises(DirectiveError, match=f"beside=True: .*{message}"):
        compiled(job(experts))
