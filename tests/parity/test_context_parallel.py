"""Protect what is special to devices that share tokens: few heads, orders and their work, exchanges, masks, refusals.

That such plans train what one device trains is checked in test_compositions.py."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import piper
from piper import Mesh
from piper.api.reference.verification import verify_strategy
from piper.views.explained.layouts import layouts
from piper_compiler import Strategy
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.select import where
from piper_simulator.metrics import model_flops
from tests.helpers import models, parity, published_llama, shared_jobs
from tests.helpers.memory_judge import lies

TOKENS = piper.shard(where(), over="cp", index="tokens")
RING = piper.shard(where(), over="cp", index="tokens", attention="ring")
GATHER = piper.shard(where(), over="cp", index="tokens", attention="gather")
ZIGZAG = piper.shard(where(), over="cp", index="tokens", order="zigzag")
HEADS = piper.shard(where(), over="tp")
BOTH = piper.shard(where(), over="tp", stream="tokens")
CASES: dict[str, list[Any]] = {
    "heads": [TOKENS],
    "ring, recompute": [RING, piper.recompute(where(layer=piper.ANY), keep="inputs")],
    "gather, recompute": [GATHER, piper.recompute(where(layer=piper.ANY), keep="attention")],
}


def compiled(name: str, mesh: Mesh, directives: list[Any]) -> Any:
    return piper.compile(shared_jobs.job(name), Strategy(mesh, directives))


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "case",
    ["heads", *(pytest.param(f"{way}, recompute", marks=LONG) for way in ("ring", "gather"))],
)
def test_more_devices_than_heads_of_keys(case: str) -> None:
    made = shared_jobs.in_twos("few_kv_heads", Mesh(cp=4), CASES[case])
    run = shared_jobs.run(made)
    shared_jobs.assert_equal("few_kv_heads", made, run)
    assert not lies(made.plan, run.memory)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=LONG)])
@pytest.mark.parametrize("cp", [pytest.param(2, marks=LONG), 4])
@pytest.mark.parametrize(
    ("way", "order"),
    [
        ("ring", "zigzag"),
        pytest.param("gather", "zigzag", marks=LONG),
        pytest.param("ring", "blocks", marks=LONG),
        pytest.param("gather", "blocks", marks=LONG),
    ],
)
def test_every_way_and_order(way: Any, order: Any, cp: int, tp: int) -> None:
    """Ranks run one program. In zigzag order each computes its share of attention, in blocks as much as the fullest
    needs."""
    tokens = piper.shard(where(), over="cp", index="tokens", attention=way, order=order)
    made = shared_jobs.in_twos("few_kv_heads", Mesh(cp=cp, tp=tp), [*[HEADS] * (tp > 1), tokens])
    assert len(made.plan.roles) == 1
    found = shared_jobs.run(made)
    shared_jobs.assert_equal("few_kv_heads", made, found)
    assert not lies(made.plan, found.memory)
    fullest = work(made) * cp * tp / work(compiled("few_kv_heads", Mesh(), []))
    assert fullest == pytest.approx(1.0 if order == "zigzag" else 2 - 1 / cp, rel=0.01)


def work(made: Any) -> float:
    """The FLOPs of attention on a device, per row."""
    kernels = [
        k
        for c in made.plan.chunks
        for sig in c.steps.values()
        for k in sig.cost.kernels
        if k.kind == "attention"
    ]
    return sum(k.flops * k.count for k in kernels) / made.plan.rows


@pytest.mark.long
@pytest.mark.parametrize("way", [RING, GATHER])
def test_a_loss_of_some_tokens(way: Any) -> None:
    """The labels and their mask are taken apart as the tokens are; some devices have more tokens that count than
    others."""
    made = piper.compile(masked_job(), Strategy(Mesh(cp=2), [way]))
    found = shared_jobs.run(made)
    parity.assert_parity(found, parity.reference(masked_job(), replicas=1, microbatches=1))
    assert not lies(made.plan, found.memory)


@functools.cache
def masked_job() -> piper.Job:
    def batch(step: int, rows: range) -> tuple[Any, Any]:
        _, target = models.masked_batch(step, rows)
        tokens, _ = models.token_batch(step, rows)
        return tokens, target

    model = functools.partial(models.TinyGPT, layers=1, tied=False)
    return replace(
        shared_jobs.job("gpt_untied", 5), model=model, batch=batch, loss=models.masked_cross_entropy
    )


def test_model_flops_do_not_depend_on_the_way() -> None:
    """They count all pairs of queries and keys, also those that causal attention leaves out."""
    ways = [[], [RING], [GATHER]]
    found = {
        model_flops(compiled("few_kv_heads", Mesh(cp=4 if way else 1), way).plan, 8) for way in ways
    }
    assert len(found) == 1


def test_a_layer_exchanges_four_times_in_each_direction() -> None:
    """Queries, keys, values and the result of attention; in the backward their gradients. Nothing else crosses."""
    made = compiled("llama", Mesh(cp=2), [TOKENS])
    chunk = next(c for c in made.plan.chunks if c.id == "layer1")
    inside = {step: Counter(c.kind for c in sig.collectives) for step, sig in chunk.steps.items()}
    assert inside == {"F": Counter(all_to_all=4), "I": Counter(all_to_all=4), "W": Counter()}


def test_gradients_of_all_weights_are_sums_over_tokens() -> None:
    made = compiled("gpt", Mesh(cp=2), [TOKENS])
    assert {p.summed for p in made.plan.params} == {("cp",)} and not any(
        p.layout for p in made.plan.params
    )
    assert {b.over for b in made.plan.buckets} == {("cp",)}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    ("mesh", "shards", "over"),
    [
        (Mesh(dp=2, cp=2), [TOKENS], ("dp", "cp")),
        (Mesh(cp=2), [RING], ("cp",)),
        (Mesh(tp=2, cp=2, dp=2), [BOTH, TOKENS], ("dp", "cp")),
    ],
    ids=str,
)
def test_states_are_sharded_along_tokens_too(
    mesh: Mesh, shards: list[Any], over: tuple[str, ...], zero: Any
) -> None:
    """Rows are equal along cp and gradients partial sums, so that every parameter has a part on each of its ranks."""
    sharding = piper.replicate(where(), over=over, zero=zero)
    made = shared_jobs.in_twos("few_kv_heads", mesh, [*shards, sharding])
    assert {set(b.shard.optim) == {*over} for b in made.plan.buckets} == {True}
    assert made.plan.replicas == mesh.size("dp")
    run = shared_jobs.run(made)
    shared_jobs.assert_equal("few_kv_heads", made, run)
    assert not lies(made.plan, run.memory)


def test_states_of_a_parameter_that_devices_have_alike_are_sharded_along_other_axes() -> None:
    """Along tp a norm's gradient is a partial sum and a matrix is divided: only the norm has parts there."""
    sharding = piper.replicate(where(), over=("dp", "tp"), zero=1)
    plan = shared_jobs.in_twos("few_kv_heads", Mesh(tp=2, dp=2), [BOTH, sharding]).plan
    divided = {p.name for p in plan.params if p.layout}
    for bucket in plan.buckets:
        along = {"dp"} if divided & {*bucket.params} else {"tp", "dp"}
        assert set(bucket.shard.optim) == along and set(bucket.over) == along


def test_tokens_of_another_device_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each device takes the other one's tokens, positions are wrong."""
    made = shared_jobs.in_twos("gpt", Mesh(cp=2), [TOKENS])
    exported = type(made.code).export

    def swap(code: Any) -> Any:
        return replace(code, source=code.source.replace("PLACE['cp']", "(1 - PLACE['cp'])", 1))

    def swapped(store: Any, codes: Any, rows: int) -> Any:
        return {
            k: {step: swap(code) for step, code in v.items()}
            for k, v in exported(store, codes, rows).items()
        }

    monkeypatch.setattr(type(made.code), "export", swapped)
    found = shared_jobs.run(made)
    wrong = parity.differences(parity.RunOutcome.of(found), shared_jobs.expected("gpt", 1, 1, 2))
    assert wrong


def test_what_is_refused() -> None:
    with pytest.raises(
        DirectiveError,
        match=r"8 tokens cannot be shared by 8 devices along cp in zigzag order.* 4 devices can",
    ):
        compiled("gpt", Mesh(cp=8), [RING])


@LONG
def test_a_mask_that_passes_between_layers_with_gathered_keys() -> None:
    """It passes whole; each device takes the rows of its queries, in its order."""
    report = verify_strategy(
        published_llama.job(), Strategy(Mesh(cp=2), [replace(GATHER, order="zigzag")]), steps=1
    )
    assert report.equal, report.text()


def test_what_is_explained() -> None:
    found = layouts(compiled("few_kv_heads", Mesh(cp=4), [RING]))
    assert (
        found.count(
            "attention over cp: keys and values go from device to device; tokens in zigzag order"
        )
        == 1
    )
    (line,) = [line for line in found.splitlines() if "F  shift" in line]
    assert "3x " in line and "over cp in attention (" in line
    assert "attention over cp: tokens are exchanged for heads; tokens in blocks" in layouts(
        compiled("gpt", Mesh(cp=2), [TOKENS])
    )
