"""Protect that plans of decoders train what one device trains, and that devices share their heads and experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import piper
from piper import Mesh, Strategy, models, recipes
from piper.api.reference.verification import verify_strategy
from piper_capture import layout_facts
from piper_compiler import Directive
from tests.helpers import parity
from tests.helpers.decoders import DECODERS
from tests.helpers.memory_judge import lies

Layout = tuple[Mesh, Callable[[], tuple[Directive, ...]]]
LAYOUTS: dict[str, Layout] = {
    "tp": (
        Mesh(tp=2),
        lambda: (*recipes.tensor_parallel(sequence=True), piper.split(piper.where(), microbatches=2)),
    ),
    "pp": (
        Mesh(pp=2, dp=2),
        lambda: (*recipes.one_f_one_b(pp=2, microbatches=2), *recipes.data_parallel(zero=1)),
    ),
    "zero": (
        Mesh(dp=2),
        lambda: (piper.split(piper.where(), microbatches=2), *recipes.data_parallel(zero=3)),
    ),
    "ep": (
        Mesh(ep=2, pp=2),
        lambda: (
            *recipes.expert_parallel(), *recipes.one_f_one_b(pp=2, microbatches=2),
            *recipes.data_parallel(over=("dp", "ep")),
        ),
    ),
}  # fmt: skip
HALVES = (piper.split(piper.where(), microbatches=2),)
CASES = [
    (name, layout)
    for k, name in enumerate(DECODERS)
    # the layouts in turn, and ep for every mixture: what is special to a decoder is in its chunks under any of them
    for layout in [["tp", "pp", "zero"][k % 3], *["ep"] * (DECODERS[name].experts is not None)]
]


@pytest.mark.sampled(40)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_decoder_trains_what_one_device_trains(name: str, layout: str) -> None:
    mesh, directives = LAYOUTS[layout]
    job = models.job(DECODERS[name], global_batch=8, precision="float64", lr=0.01)
    strategy = Strategy(mesh, directives())
    assert verify_strategy(job, strategy, steps=2).equal


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", DECODERS)
def test_devices_share_heads_and_products(name: str) -> None:
    """Whole on each device are norms, routers and what passes between layers: no attention, and no large product."""
    mesh, directives = LAYOUTS["tp"]
    job = models.job(DECODERS[name], global_batch=8, precision="float64")
    compiled = piper.compile(job, Strategy(mesh, directives()))
    assert compiled.code is not None
    whole: set[str] = set()
    for facts in layout_facts(compiled.code, compiled.program):
        assert facts.work is not None and not facts.unknown
        whole |= {title.partition(" ")[0] for title in facts.work.whole}
        held = {facts.inputs[k] for k in facts.unshared or ()}
        assert not [
            n for n in held if n.endswith(("up.weight", "attention.out.weight", ".q.weight"))
        ]
    assert not whole & {"mm", "addmm", "bmm", "grouped_mm", "attention", "attention_dgrad"}


SINKS: dict[str, tuple[Mesh, tuple[Directive, ...]]] = {
    "backward in two, attention kept": (
        Mesh(pp=2, dp=2),
        (*recipes.zb_h1(pp=2, microbatches=2), *recipes.data_parallel(zero=1),
         piper.recompute(piper.where(layer=piper.ANY), keep="attention")),
    ),
    "heads, inputs kept": (
        Mesh(tp=2, dp=2),
        (*recipes.tensor_parallel(sequence=True), *recipes.data_parallel(zero=3), *HALVES,
         piper.recompute(piper.where(layer=piper.ANY), keep="inputs")),
    ),
    "ring": (Mesh(cp=2, tp=2), (*recipes.tensor_parallel(), *recipes.context_parallel(attention="ring"), *HALVES)),
    "gathered keys": (Mesh(cp=4), (*recipes.context_parallel(attention="gather"), *HALVES)),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", SINKS)
def test_sinks_train_what_attention_written_out_trains(layout: str) -> None:
    """The kernel's result and gradients equal a softmax with one more column's, also in parts of keys."""
    sizes = replace(DECODERS["sinks"], window=None, window_every=1)
    jobs = [
        models.job(s, global_batch=4, precision="float64", lr=0.01)
        for s in (sizes, replace(sizes, attention="math"))
    ]
    mesh, directives = SINKS[layout]
    compiled = piper.compile(jobs[0], Strategy(mesh, directives))
    run = piper.execute(compiled, steps=2, launcher="inline", memory=True, gradients=True)
    replicas = compiled.plan.replicas
    parity.assert_parity(run, parity.reference(jobs[1], replicas=replicas, microbatches=2, steps=2))
    assert not lies(compiled.plan, dict(run.memory))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", SINKS)
@pytest.mark.parametrize("name", ["sinks", "Gemma 3"])
def test_windows_train_what_their_mask_trains(name: str, layout: str) -> None:
    """Each device computes several blocks of queries with the keys in their windows, beside layers without a window."""
    sizes = replace(DECODERS[name], length=320, window=20, window_every=2)
    jobs = [
        models.job(s, global_batch=4, precision="float64", lr=0.01)
        for s in (sizes, replace(sizes, attention="math"))
    ]
    mesh, directives = SINKS[layout]
    if layout == "ring":
        with pytest.raises(
            piper.DirectiveError, match=r"attention .* has a window, of which each device"
        ):
            piper.compile(jobs[0], Strategy(mesh, directives))
        return
    compiled = piper.compile(jobs[0], Strategy(mesh, directives))
    run = piper.execute(compiled, steps=2, launcher="inline", memory=True, gradients=True)
    replicas = compiled.plan.replicas
    parity.assert_parity(run, parity.reference(jobs[1], replicas=replicas, microbatches=2, steps=2))
    assert not lies(compiled.plan, dict(run.memory))
    assert "read" not in dict(sizes.build().named_buffers()), "no mask of all scores"


def test_a_stage_of_its_own_predicts_further_tokens() -> None:
    """The embedding is then on the first stage and on this one; the plan's memory is that of the run."""
    job = models.job(replace(DECODERS["Llama"], mtp=1), global_batch=4, precision="float64")
    parts = (piper.partition(3, at=(3, 4), units="all"), recipes.one_f_one_b(rows=2))
    compiled = piper.compile(job, Strategy(Mesh(pp=3), parts, global_batch=4))
    (holders,) = [b.roles for b in compiled.plan.buckets if "tokens.weight" in b.params]
    assert holders == ("pp0", "pp1")
    run = piper.execute(compiled, steps=2, launcher="inline", memory=True, gradients=True)
    parity.assert_parity(run, parity.reference(job, microbatches=2, steps=2))
    assert not lies(compiled.plan, dict(run.memory))


def test_an_encoder_trains_what_one_device_trains() -> None:
    """Rows have different numbers of masked tokens: the batch decides the denominator, and no microbatch does."""
    job = models.job(DECODERS["BERT"], global_batch=8, precision="float64", lr=0.01)
    parts = (
        *recipes.tensor_parallel(), *recipes.one_f_one_b(rows=2), *recipes.data_parallel(zero=1),
    )  # fmt: skip
    compiled = piper.compile(job, Strategy(Mesh(pp=2, dp=2, tp=2), parts, global_batch=8))
    run = piper.execute(compiled, steps=2, launcher="inline", memory=True, gradients=True)
    parity.assert_parity(run, parity.reference(job, microbatches=2, replicas=2, steps=2))
    assert not lies(compiled.plan, dict(run.memory))


def test_parts_of_states_along_other_axes_count_once_in_the_norm() -> None:
    """Devices along cp have the gradients of written out sinks alike, and all others in parts."""
    job = models.job(
        DECODERS["sinks written out"], global_batch=4, precision="float64", clip_norm=0.1
    )
    states = recipes.data_parallel(over=("dp", "cp"), zero=1)
    parts = (recipes.context_parallel(attention="heads"), states)
    compiled = piper.compile(job, Strategy(Mesh(dp=2, cp=2), parts))
    assert {b.shard.optim for b in compiled.plan.buckets} == {("cp", "dp"), ("dp",)}
    run = piper.execute(compiled, steps=2, launcher="inline", memory=True, gradients=True)
    parity.assert_parity(run, parity.reference(job, replicas=2, steps=2))
    assert not lies(compiled.plan, dict(run.memory))
