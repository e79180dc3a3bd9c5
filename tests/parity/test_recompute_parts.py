"""Protect that a policy of recomputation may be about modules inside of a layer, or about every n-th product."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import ANY, models
from piper.api.compiling.compiling import Compiled
from piper.planning.foreign import model_sizes
from piper.views.explained.recompute import recomputation
from piper_capture.steps.recompute import KeepPolicy
from piper_compiler import Strategy, recipes, split
from piper_interop.megatron.sizes import policy_of
from piper_ir.ground.errors import DirectiveError, SelectorError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.program.program import Chunk, Signature, Step
from piper_ir.verify import check
from piper_runtime import Run
from tests.helpers import compositions
from tests.helpers.models import CASES, D
from tests.parity.test_recompute import FLOAT64, differing, judged, trained

Directives = tuple[Any, ...]
GPIPE = recipes.gpipe(pp=1, microbatches=2)
TENSOR = (*recipes.tensor_parallel(sequence=True), *GPIPE)
EXPERTS = (*recipes.expert_parallel(), *GPIPE, *recipes.data_parallel(over=("ep",)))


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "written": {"attention": "math", "dropout": 0.2},
    "mixed": {
        "experts": models.Experts(number=4, top_k=2, hidden=16, shared_hidden=16),
        "latent": models.Latent(q_rank=8, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=4),
        "dense_layers": 1,
    },
}


@functools.cache
def decoder(model: str) -> piper.Job:
    return models.job(sizes(model), global_batch=4, length=8, precision=FLOAT64)


def sizes(model: str) -> models.DecoderConfig:
    """Return the sizes of two layers, of which the first is dense in a mixture, too."""
    common: dict[str, Any] = {"vocab": 32, "width": 16, "heads": 4, "hidden": 32}
    return models.DecoderConfig(layers=2, length=8, **common, **MODELS[model])


@functools.cache
def compiled(model: str, axis: str, *directives: Any) -> Compiled:
    mesh = Mesh(**({axis: 2} if axis else {}))
    return piper.compile(decoder(model), Strategy(mesh, directives))


@functools.cache
def plain(model: str, axis: str, *directives: Any) -> Run:
    return trained(compiled(model, axis, *directives))


def variants(made: Compiled) -> list[Chunk]:
    return [c for c in made.plan.variants if "R" in c.steps]


def products(chunk: Chunk) -> int:
    """The matrix products in R."""
    return sum(k.count for k in chunk.steps["R"].cost.kernels if k.kind == "matmul")


CASES_OF_MODULES: tuple[tuple[str, str, Directives, dict[str, Any], int], ...] = (
    ("written", "", GPIPE, {"modules": "*.core", "keep": "outputs"}, 1),
    ("written", "", GPIPE, {"modules": "*.core"}, 2),
    ("written", "", GPIPE, {"modules": ("*.norm1", "*.norm2"), "apart": True}, 0),
    ("written", "", GPIPE, {"keep": "inputs@*.norm?&outputs@*.core"}, 1),
    ("plain", "tp", TENSOR, {"modules": "*.feed_forward"}, 2),
    ("plain", "tp", TENSOR, {"keep": "products/2"}, 3),
    ("mixed", "", GPIPE, {"modules": ("*.q_up", "*.kv_up", "*.turn")}, 2),
    ("mixed", "ep", EXPERTS, {"modules": ("*.activation", "*.times")}, 0),
    ("mixed", "ep", EXPERTS, {"modules": "layers.1-1.feed_forward"}, 3),
    ("mixed", "", GPIPE, {"modules": "*.sort"}, 0),
    ("mixed", "ep", EXPERTS, {"modules": ("*.sort", "*.activation")}, 0),
    ("mixed", "", GPIPE, {"modules": "*.results"}, 1),
    ("mixed", "ep", EXPERTS, {"modules": "*.results"}, 1),
)
"""Model, axis of two devices, strategy, arguments of recompute, products that R makes again in a chunk."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.long] * (c[1] == "ep")) for c in CASES_OF_MODULES],
    ids=lambda c: f"{c[0]}-{c[1]}-{c[3].get('modules', c[3].get('keep'))}",
)
def test_a_part_of_a_layer_is_computed_again(
    case: tuple[str, str, Directives, dict[str, Any], int],
) -> None:
    model, axis, directives, how, again = case
    made = compiled(model, axis, *directives, piper.recompute(where(layer=ANY), **how))
    judged(made, plain(model, axis, *directives))
    assert max(map(products, variants(made))) == again
    before = compiled(model, axis, *directives).plan
    assert made.plan.roles[0].peak_bytes < before.roles[0].peak_bytes
    assert f"{variants(made)[0].keep}: " in recomputation(made.plan)


def test_every_second_product_is_kept_from_the_first_on() -> None:
    """R makes every second product of q, k, v, out, gate, up and down: k, out and up. No backward reads down, and it
    needs q and k turned alone, so that "products" does not keep them."""
    keeps = ("products", "products/1", "products/2", "products/3")
    made = [compiled("plain", "", *GPIPE, piper.recompute(where(layer=ANY), keep=k)) for k in keeps]
    judged(made[2], plain("plain", "", *GPIPE))
    assert [max(map(products, variants(m))) for m in made] == [3, 0, 3, 4]
    peaks = [m.plan.roles[0].peak_bytes for m in made[1:]]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3


def test_a_pattern_may_be_about_one_of_equal_layers() -> None:
    made = compiled("plain", "", *GPIPE, piper.recompute(where(), modules="layers.1.feed_forward"))
    judged(made, plain("plain", "", *GPIPE))
    assert [c.id for c in variants(made)] == ["layer1"]


@pytest.mark.parametrize("part", ["moe_act", "mla_up_proj", "shared_experts", "mlp", "moe"])
def test_the_parts_that_megatron_names_are_modules_that_run(part: str) -> None:
    policy = policy_of([part], model_sizes(sizes("mixed")))
    made = compiled("mixed", "", *GPIPE, piper.recompute(where(layer=ANY), keep=policy))
    layers = {c.coords["layer"] for c in variants(made)}
    assert layers == {"mlp": {0}, "mla_up_proj": {0, 1}}.get(part, {1})


class Adapted(nn.Module):
    """A frozen product whose input no backward needs, and an opaque region, both inside of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(D, D, bias=False), nn.Tanh(), nn.Linear(D, D))
        self.inner[0].weight.requires_grad_(False)
        self.first, self.own = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inner(torch.cos(self.first(x)) + x)
        with piper.region(opaque=True):
            return self.own(x).tanh().exp()


@functools.cache
def adapted(**how: Any) -> Compiled:
    case, sgd = CASES["skip"], compositions.OPTIMIZERS["sgd"]
    job = piper.Job(Adapted, case.batch, case.loss, sgd, global_batch=4, precision=FLOAT64)
    more = (piper.recompute(where(), **how),) if how else ()
    return piper.compile(job, Strategy(Mesh(), (split(where(), microbatches=2), *more)))


def test_what_a_module_reads_is_kept_although_no_backward_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R makes tanh's argument from the input of the module, and not that from the first product again."""
    base = trained(adapted())
    made = adapted(modules="inner")
    judged(made, base)
    (variant,) = variants(made)
    before = made.plan.chunk(variant.id)
    kernels = [k.op for k in variant.steps["R"].cost.kernels]
    assert kernels == ["mm", "tanh"]
    (more,) = {*variant.steps["F"].writes} - {*before.steps["F"].writes}
    assert more in variant.steps["R"].reads

    # The control: F that does not keep it is found, and so is one that keeps it for nothing.
    f, r = variant.steps["F"], variant.steps["R"]
    less = replace(f, writes=tuple(p for p in f.writes if p != more))
    blind = replace(r, reads=tuple(p for p in r.reads if p != more))
    faults: tuple[tuple[Step, Signature, str], ...] = (
        ("F", less, f"R reads {more}"),
        ("R", blind, f"F keeps {more}"),
    )
    for step, sig, said in faults:
        broken = replace(variant, keep="other", steps={**variant.steps, step: sig})
        found = check(replace(made.plan, variants=(*made.plan.variants, broken)))
        assert [v.rule for v in found] == ["R33-recompute"] and said in found[0].message
    monkeypatch.setattr(KeepPolicy, "repeats", lambda policy, node: True)
    adapted.cache_clear()
    whole = adapted(modules="?nner")
    assert "cos" in [k.op for k in variants(whole)[0].steps["R"].cost.kernels]
    assert differing(trained(whole), base) == []


def test_an_opaque_region_is_made_again_as_a_whole_where_a_module_is_inside() -> None:
    made = adapted(modules="own")
    judged(made, trained(adapted()))
    assert [made.plan.chunk(c.id).coords.get("opaque") for c in variants(made)] == [1]


class Turned(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.tanh().exp())


def turned() -> nn.Module:
    return nn.Sequential(*(Turned(D, D) for _ in range(4)))


def test_a_group_makes_outputs_again_that_are_products() -> None:
    """The policy keeps all products, and the group none of what its layers hand on."""
    case, sgd = CASES["skip"], compositions.OPTIMIZERS["sgd"]
    job = piper.Job(turned, case.batch, case.loss, sgd, global_batch=4, precision=FLOAT64)
    base, made = (
        piper.compile(job, Strategy(Mesh(), (*GPIPE, *more)))
        for more in ((), (piper.recompute(where(), keep="products/1", group=2),))
    )
    judged(made, trained(base))
    handing = [c for c in variants(made) if c.keep == "products/1!"]
    assert handing and all(products(c) == 1 for c in handing)


def test_a_product_that_is_kept_is_not_spoilt_where_it_is_sent() -> None:
    """A reduce-scatter of one row takes a view of the product before it, and leaves that memory undefined."""
    one_row = (*recipes.tensor_parallel(sequence=True), *recipes.gpipe(pp=1, microbatches=4))
    group = piper.recompute(where(layer=ANY), keep="products/2", group=2)
    judged(compiled("plain", "tp", *one_row, group), plain("plain", "tp", *one_row))


def refused(kind: type[Exception], **how: Any) -> str:
    with pytest.raises(kind) as error:
        compiled("plain", "", *GPIPE, piper.recompute(where(layer=ANY), **how))
    return str(error.value)


def test_what_is_refused() -> None:
    text = refused(DirectiveError, keep="products/0")
    assert "'products/2'" in text and "[recompute condition 2]" in text
    assert "[recompute condition 2]" in refused(DirectiveError, keep="attention/2")
    text = refused(DirectiveError, keep="outputs")
    assert "give modules=" in text and "[recompute condition 2]" in text
    text = refused(DirectiveError, keep="softmacks", modules="*.core")
    assert "'softmacks', which is no op" in text and "[recompute condition 2]" in text
    text = refused(DirectiveError, keep="inputs@*.norm1&products")
    assert "'products' is about parts of layers" in text and "[recompute condition 2]" in text
    text = refused(DirectiveError, modules="*.core", group=2)
    assert "leave one of the two out" in text and "[recompute condition 7]" in text
    assert "[recompute condition 8]" in refused(DirectiveError, keep="all", modules="*.core")
    assert "[recompute condition 8]" in refused(DirectiveError, modules="")
    text = refused(SelectorError, modules="*.mlp")
    assert "no module matches '*.mlp'" in text and "layers.0.norm1" in text
    assert "no operation runs inside of" in refused(SelectorError, modules="*.after1")
    assert "[recompute condition 6]" in refused(DirectiveError, modules="norm")


def test_modules_are_a_part_of_the_policy_in_files_and_searches() -> None:
    item = piper.recompute(where(layer=ANY), modules=("*.core", "*.norm1"))
    assert item == piper.recompute(where(layer=ANY), "inputs@*.core+*.norm1")
    strategy = Strategy(Mesh(), (*GPIPE, item))
    assert Strategy.loads(strategy.dumps()) == strategy

    def policies(trial: Any) -> Strategy:
        keep = trial.suggest_categorical("keep", ["all", "inputs@*.feed_forward", "inputs"])
        return Strategy(Mesh(), (*GPIPE, piper.recompute(where(layer=ANY), keep=keep)))

    held = [
        compiled("plain", "", *GPIPE, piper.recompute(where(layer=ANY), keep=keep)).plan.roles[0]
        for keep in ("all", "inputs@*.feed_forward", "inputs")
    ]
    assert held[0].peak_bytes > held[1].peak_bytes > held[2].peak_bytes
    free = piper.tune(decoder("plain"), policies, cluster="h100x8", trials=3, workers=0)
    by_keep = {row.params["keep"]: row.device_bytes or 0 for row in free.rows}
    limit = by_keep["inputs@*.feed_forward"]
    few = piper.tune(
        decoder("plain"), policies, cluster="h100x8", trials=3, workers=0, memory_limit=limit
    )
    assert few.best_row is not None
    assert few.best_row.params == {"keep": "inputs@*.feed_forward"}
