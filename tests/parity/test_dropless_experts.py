"""Devices that share the experts of a dropless mixture compute what one device computes, whatever tokens choose."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import piper
from piper import ANY, Mesh, Precision, Strategy, models, recipes, where
from piper.api.compiling.compiling import Compiled
from piper_capture.steps import phases
from piper_ir.ground.errors import DirectiveError, RankError
from piper_ir.program.layout import DimPart
from piper_ir.verify import verify
from piper_ops.experts import reserved, rounds
from piper_runtime.launch.processes.processes import Pool
from tests.helpers import expert_loops, parity
from tests.helpers.cases import each_case
from tests.helpers.memory_judge import lies
from tests.helpers.steered import (
    DEVICES,
    EXPERTS,
    LOADS,
    TOKENS,
    WIDTH,
    Steered,
    SteeredMixture,
    batch,
)

MIXTURE = models.MoEConfig(
    layers=2,
    width=16,
    heads=4,
    kv_heads=2,
    head_dim=6,
    hidden=24,
    vocab=32,
    length=8,
    experts=4,
    top_k=2,
    capacity_factor=None,
)


@functools.cache
def job(load: str) -> piper.Job:
    model = functools.partial(SteeredMixture, load)
    precision = Precision(params="float64")
    return piper.Job(
        model,
        batch,
        F.mse_loss,
        expert_loops.optimizer,
        global_batch=8,
        precision=precision,
        clip_norm=0.1,
        tokens_per_row=TOKENS,
    )


@functools.cache
def expected(load: str, replicas: int, microbatches: int) -> parity.Reference:
    return parity.reference(job(load), replicas=replicas, microbatches=microbatches, steps=2)


def shared(**more: Any) -> Any:
    return piper.shard(
        where(experts=ANY), **{"over": "ep", "index": "experts", "stream": "rows", **more}
    )


@functools.cache
def compiled(load: str, mesh: Mesh, *directives: Any, zero: int = 0, **more: Any) -> Compiled:
    rows = recipes.data_parallel(over=("dp", "ep"), zero=zero)
    return piper.compile(job(load), Strategy(mesh, [shared(**more), *directives, *rows]))


def run(made: Compiled, **more: Any) -> Any:
    return piper.execute(made, steps=2, gradients=True, **{"launcher": "inline", **more})


def assert_right(load: str, made: Compiled, **more: Any) -> Any:
    verify(made.plan)
    found = run(made, **more)
    parity.assert_parity(found, expected(load, made.plan.replicas, made.plan.microbatches))
    assert not lies(made.plan, found.memory)
    return found


def frozen(load: str) -> SteeredMixture:
    """A mixture of which the matrices of experts are not trained."""
    model = SteeredMixture(load)
    for p in model.parameters():
        p.requires_grad_(p.ndim < 3)
    return model


@pytest.mark.long
def test_frozen_experts_hand_gradients_on() -> None:
    """In further rounds, too, where there is no gradient of a matrix to add up."""
    work = replace(job("all to one"), model=functools.partial(frozen, "all to one"))
    made = piper.compile(
        work, Strategy(Mesh(ep=2), [shared(), *recipes.data_parallel(over=("ep",))])
    )
    parity.assert_parity(run(made), parity.reference(work, replicas=2, microbatches=1, steps=2))


ROUNDS = {"uniform": 1, "1.5": 2, "2": 2, "all to one": 4}
"""Places for 10 rows from each device in a row of tokens: for bound 1.25, and 8 that would come if all got equally
many."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "load", [pytest.param(load, marks=[pytest.mark.long] * (load == "1.5")) for load in LOADS]
)
def test_every_load_trains_what_one_device_trains_in_the_memory_of_the_plan(
    load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, right = compiled(load, Mesh(ep=DEVICES)), rounds.round_count
    counted: set[int] = set()

    def count(table: Tensor, slot: int) -> int:
        counted.add(number := right(table, slot))
        return number

    monkeypatch.setattr(rounds, "round_count", count)
    found = assert_right(load, made)
    assert {record.peak for record in found.memory.values()} == {made.plan.roles[0].peak_bytes}
    assert counted == {ROUNDS[load]}


def test_negative_control_without_room_for_further_rounds_a_peak_is_not_that_of_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reserved, "reserve", lambda *_: None)
    made = compiled("uniform", Mesh(ep=DEVICES))
    assert lies(made.plan, run(made).memory)


@pytest.mark.long
def test_gradients_of_experts_are_those_of_one_device_to_the_bit_where_there_are_no_further_rounds() -> (
    None
):
    """Rows of further rounds are added behind those of round 0, so sums differ in their last bits."""
    work, rows = replace(job("2"), clip_norm=None), recipes.data_parallel(over=("dp", "ep"))

    def gradients(mesh: Mesh, *directives: Any) -> dict[str, Tensor]:
        found = run(piper.compile(work, Strategy(mesh, directives))).gradients[0]
        return {name: grad for name, grad in found.items() if name.endswith((".up", ".down"))}

    one = gradients(Mesh())
    for bound, same in ((2.0, True), (1.25, False)):
        four = gradients(Mesh(ep=DEVICES), shared(bound=bound), *rows)
        assert one and all(torch.equal(four[name], one[name]) for name in one) == same
        for name in one:
            torch.testing.assert_close(
                four[name], one[name], rtol=0, atol=2e-15 * one[name].abs().max().item()
            )


def test_a_device_has_its_experts_and_reduces_the_rest() -> None:
    made = compiled("uniform", Mesh(ep=DEVICES))
    layouts = {p.name: p.layout for p in made.plan.params}
    assert layouts["layers.0.up"] == layouts["layers.0.down"] == (DimPart("ep", 0),)
    assert layouts["layers.0.router.weight"] == ()
    chunk = next(c for c in made.plan.chunks if c.experts)
    sizes = {
        step: [(c.kind, c.nbytes) for c in sig.collectives] for step, sig in chunk.steps.items()
    }
    rows = DEVICES * 2 * 10 * WIDTH * 8  # places for 2 rows of tokens, in float64
    both = [("all_to_all", rows)] * 2
    more = (
        "all_to_all",
        0,
    )  # in further rounds: rows and results, or rows, gradients and those of rows, or the first two
    assert sizes["F"] == [("all_gather", DEVICES * EXPERTS * 8), *both, more, more]
    assert sorted(sizes["I"]) == [more, more, more, *both] and sizes["W"] == [more, more]


def test_further_rounds_add_to_what_round_0_made() -> None:
    made = compiled("uniform", Mesh(ep=DEVICES))
    assert made.code is not None
    steps = made.code.export(
        [c.code for c in made.plan.chunks if c.experts], made.plan.rows
    ).values()
    texts = "".join(code.source for found in steps for code in found.values())
    assert all(f"piper::experts_further_{name}_" in texts for name in ("dgrad", "wgrad"))
    assert "piper::experts_return_dgrad" not in texts and "piper::experts_return_wgrad" not in texts
    assert "_piper_grouped_mm_wgrad__default(" in texts and "any_rows=True" in texts


def test_the_backward_makes_the_rows_again_that_a_device_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F keeps one tensor [choices, width], the experts' results. The control is a plan that keeps the rows, too."""

    def kept(bound: float) -> list[int]:
        made = compiled("uniform", Mesh(ep=2), bound=bound)
        chunk = next(c for c in made.plan.chunks if c.experts)
        assert [[k.op for k in chunk.steps[s].cost.kernels].count("route") for s in "FIW"] == again
        saved = (chunk.ports[w] for w in chunk.steps["F"].writes if w.startswith("saved"))
        assert_right("uniform", made)
        return [spec.shape for spec in saved].count((4 * TOKENS * 2, WIDTH))

    again = [1, 1, 1]
    assert kept(1.5) == 1
    monkeypatch.setattr(phases, "_sends_rows", lambda node: False)
    again = [1, 0, 0]
    assert kept(1.75) == 2


COMPOSED: dict[str, tuple[Mesh, list[Any], dict[str, Any]]] = {
    "dp, split backward": (Mesh(ep=2, dp=2, pp=2), [recipes.zb_h1(pp=2, microbatches=2)], {}),
    "zero 3, two microbatches": (Mesh(ep=4), [piper.split(where(), microbatches=2)], {"zero": 3}),
    "recompute": (Mesh(ep=4), [piper.recompute(where(), keep="inputs")], {}),
    "1f1b, zero 1": (Mesh(ep=2, pp=2), [recipes.one_f_one_b(pp=2, microbatches=4)], {"zero": 1}),
    "a small bound": (Mesh(ep=4), [], {"bound": 0.3}),
    "a large bound": (Mesh(ep=4), [], {"bound": 100.0}),
}
LONG = ("recompute", "zero 3, two microbatches", "1f1b, zero 1", "a small bound", "a large bound")


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n in LONG)) for n in COMPOSED]
)
def test_it_composes(name: str) -> None:
    mesh, directives, more = COMPOSED[name]
    assert_right("2", compiled("2", mesh, *directives, **more))


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["zbv", "dualpipe_v"])
def test_a_model_with_attention_whose_heads_are_shared(schedule: str) -> None:
    work = models.job(
        replace(MIXTURE, layers=4), global_batch=8, precision="float64", lr=0.01, clip_norm=0.05
    )
    pipeline = getattr(recipes, schedule)(pp=2, microbatches=2 if schedule == "zbv" else 4)
    rows = recipes.data_parallel(over=("dp", "ep"))
    made = piper.compile(
        work,
        Strategy(
            Mesh(ep=2, tp=2, pp=2), [shared(bound=0.7), piper.shard(where()), *pipeline, *rows]
        ),
    )
    verify(made.plan)
    found = run(made)
    parity.assert_parity(
        found, parity.reference(work, replicas=2, microbatches=made.plan.microbatches, steps=2)
    )
    assert not lies(made.plan, found.memory)


def test_what_is_shared_of_a_dropless_mixture_is_called_experts() -> None:
    with pytest.raises(
        DirectiveError,
        match=r"experts of a dropless mixture \(layer0_experts0\); write index='experts'",
    ):
        compiled("2", Mesh(ep=2), index="heads")


@pytest.mark.long
def test_in_processes(pool: Pool) -> None:
    assert_right("all to one", compiled("all to one", Mesh(ep=2)), launcher="processes", pool=pool)


def test_too_few_places_end_a_run_with_the_bound_that_would_do() -> None:
    """Two devices: 16 rows of each row of tokens would go to each other one, all 32 do."""
    made = compiled("all to one", Mesh(ep=2), overflow="error")
    with pytest.raises(
        RankError, match=r"rank \d, step 0.*layer0_experts0.F@0: a device has .* bound=2 would do"
    ) as error:
        run(made)
    assert "rounds" in str(error.value)
    assert_right("all to one", compiled("all to one", Mesh(ep=2), overflow="error", bound=2.0))


def test_what_is_dropped_is_the_end_of_a_row_and_the_same_each_time() -> None:
    """One device of two gets all: 20 of 32 choices of a row of tokens have places, those of its first 10 tokens."""
    made = compiled("all to one", Mesh(ep=2), piper.split(where(), microbatches=4), overflow="drop")
    first, again = run(made), run(made)
    assert first.losses == again.losses
    whole = Steered.forward

    def dropped(self: Steered, x: Tensor) -> Tensor:
        return torch.cat([whole_of(self, x)[:, :10], x[:, 10:]], dim=1)

    def whole_of(self: Steered, x: Tensor) -> Tensor:
        return whole(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steered, "forward", dropped)
        parity.assert_parity(
            first, parity.reference(job("all to one"), replicas=2, microbatches=4, steps=2)
        )


@each_case(
    ("load", "directive", "message"),
    [
        ("2", dict(bound=0), r"bound=0; a positive number"),
        ("2", dict(bound="2"), r"bound='2'; a positive number"),
        (
            "2",
            dict(sms=8),
            r"channel and sms .*; dropless mixtures have their exchanges inside .*: leave them out",
        ),
        (
            "2",
            dict(channel="ep"),
            r"channel and sms .*; dropless mixtures have their exchanges inside .*: leave them out",
        ),
        ("2", dict(overflow="wait"), r"overflow='wait'; 'rounds', 'error', 'drop' are accepted"),
    ],
)
def test_what_is_not_legal_is_refused(load: str, directive: dict[str, Any], message: str) -> None:
    with pytest.raises(DirectiveError, match=message):
        compiled(load, Mesh(ep=2), **directive)


def test_a_bound_is_for_rows_alone() -> None:
    with pytest.raises(DirectiveError, match=r"bound and overflow are for dropless mixtures"):
        piper.compile(job("2"), Strategy(Mesh(tp=2), [piper.shard(where(), bound=2.0)]))


def test_experts_that_devices_cannot_share_are_refused() -> None:
    with pytest.raises(DirectiveError, match=r"8 experts cannot be shared equally by 3 devices"):
        compiled("2", Mesh(ep=3))


@pytest.mark.long
def test_a_replaced_loop_over_experts_is_shared() -> None:
    work = replace(expert_loops.job(expert_loops.tagged), global_batch=4)
    made = piper.compile(
        work, Strategy(Mesh(ep=2), [shared(bound=1.0), *recipes.data_parallel(over=("ep",))])
    )
    found = run(made)
    parity.assert_parity(found, parity.reference(work, replicas=2, microbatches=1, steps=2))
    assert not lies(made.plan, found.memory)


def test_experts_without_a_tag_are_refused_with_the_tag_that_they_need() -> None:
    work = expert_loops.job(expert_loops.untagged)
    with (
        pytest.raises(
            DirectiveError, match=r"tag module 'layers.0.experts' and 1 more .*piper.tag"
        ) as error,
        pytest.warns(),
    ):
        piper.compile(work, Strategy(Mesh(ep=2), [shared(), *recipes.data_parallel(over=("ep",))]))
    advised = str(error.value).partition("piper.tag(model, ")[2].removesuffix(")")
    assert eval(advised) == expert_loops.TAGS
