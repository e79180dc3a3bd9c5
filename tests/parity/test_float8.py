"""Protect float8: strategies train what one device trains with the same emulation, in the memory that was planned.

The judge's emulation is plain PyTorch of its own (reference_float8.py), one microbatch after the other: a scale is that
of a microbatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import Float8, Job, Mesh, Precision, Strategy, models, recipes, where
from piper.api.reference import reference_float8
from piper_ir.ground.errors import CaptureError, ClusterError, JobError
from piper_ir.verify import verify
from piper_simulator import simulate
from tests.helpers import parity
from tests.helpers.cases import each_case
from tests.helpers.memory_judge import lies

STEPS = 2
SIZES = models.DecoderConfig(layers=2, width=32, heads=2, hidden=64, vocab=64, length=32)
BLOCKED = models.DecoderConfig(layers=1, width=128, heads=1, hidden=128, vocab=16, length=128)
MIXTURE = replace(
    SIZES, layers=1, experts=models.Experts(number=4, top_k=2, hidden=32, shared_hidden=32)
)


def job(
    recipe: str, *, sizes: Any = SIZES, rows: int = 6, saved: str = "input", **dtypes: str
) -> Job:
    float8 = Float8(recipe, keep=("head",), saved=saved)
    precision = Precision(**{"params": "float64", **dtypes}, float8=float8)  # type: ignore[arg-type]  # dtypes
    return models.job(sizes, global_batch=rows, precision=precision)


def judged(trained: Job, mesh: Mesh, *pieces: Any, tolerance: float = parity.FLOAT64) -> Any:
    """Run a strategy, compare it with one device, and return its compiled plan."""
    compiled = piper.compile(trained, Strategy(mesh, pieces))
    plan = compiled.plan
    verify(plan)
    run = piper.execute(compiled, steps=STEPS, launcher="inline", memory=True, gradients=True)
    expected = parity.reference(
        trained, replicas=plan.replicas, microbatches=plan.microbatches, steps=STEPS
    )
    parity.assert_parity(run, expected, tolerance)
    found = lies(plan, run.memory)
    assert not found, "\n".join(found[:6])
    return compiled


THREE = piper.split(where(), microbatches=3)


@pytest.mark.parametrize(
    "recipe",
    [
        "tensorwise",
        *(
            pytest.param(r, marks=pytest.mark.long)
            for r in ("rowwise", "rowwise_with_gw_hp", "mxfp8")
        ),
    ],
)
def test_pipelines_train_what_one_device_trains(recipe: str) -> None:
    """W reads what I has quantised where a recipe has one tensor for both."""
    judged(job(recipe), Mesh(pp=2), *recipes.zb_h1(pp=2, microbatches=3))


@pytest.mark.parametrize(
    ("recipe", "saved"),
    [
        ("mxfp8", "float8"),
        pytest.param("tensorwise", "float8", marks=pytest.mark.long),
        pytest.param("rowwise", "input", marks=pytest.mark.long),
    ],
)
def test_saved_tensors_and_recomputation(recipe: str, saved: str) -> None:
    judged(job(recipe, saved=saved), Mesh(), THREE, piper.recompute(where(layer=0), keep="inputs"))


def test_what_waits_for_a_weight_gradient_has_a_byte_per_element() -> None:
    def saved(trained: Job) -> Counter[str]:
        plan = piper.compile(trained, Strategy(Mesh(), ())).plan
        ports = next(c for c in plan.chunks if c.id == "layer1").ports
        return Counter(p.dtype for name, p in ports.items() if name.startswith("saved"))

    assert "float8_e4m3fn" not in saved(job("tensorwise"))
    # the inputs of queries, keys and values; of the product behind attention; of gate and up; of down
    assert saved(job("tensorwise", saved="float8"))["float8_e4m3fn"] == 4


@pytest.mark.parametrize("recipe", [pytest.param("tensorwise", marks=pytest.mark.long), "rowwise"])
def test_states_are_shared(recipe: str) -> None:
    pieces = (piper.split(where(), microbatches=3), *recipes.data_parallel(zero=3))
    judged(job(recipe, rows=12), Mesh(dp=2), *pieces)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("recipe", "sequence"),
    [
        ("tensorwise", True),
        ("rowwise_with_gw_hp", False),
        *(
            pytest.param(*way, marks=pytest.mark.long)
            for way in (("tensorwise", False), ("rowwise", True), ("rowwise_with_gw_hp", True))
        ),
    ],
)
def test_a_scale_of_a_shared_tensor_is_that_of_all_of_it(recipe: str, sequence: bool) -> None:
    """Devices gather the scales of their parts; no tensor is gathered that bfloat16 would not gather, too."""
    made = judged(job(recipe), Mesh(tp=2), *recipes.tensor_parallel(sequence=sequence))
    chunk = next(c for c in made.plan.chunks if c.id == "layer1")
    kinds = Counter(c.kind for c in chunk.steps["F"].collectives)
    assert kinds["reduce_scatter" if sequence else "all_reduce"] == 2
    if recipe == "tensorwise":
        assert kinds["all_gather"] > 2


@pytest.mark.long
def test_blocks_of_128() -> None:
    judged(job("blockwise", sizes=BLOCKED), Mesh(dp=2), *recipes.data_parallel())


@pytest.mark.long
def test_the_shared_part_of_a_mixture_is_quantised() -> None:
    """The router's features are no multiples of 16, and experts have a product of their own."""
    made = judged(
        job("tensorwise", sizes=MIXTURE),
        Mesh(ep=2),
        *recipes.expert_parallel(),
        piper.replicate(where(), over="ep"),
    )
    assert "layers.0.feed_forward.router" in next(n for n in made.notes if "float8" in n)


@pytest.mark.long
def test_mixed_precision() -> None:
    trained = job("tensorwise", compute="float32")
    judged(trained, Mesh(pp=2), *recipes.gpipe(pp=2, microbatches=3), tolerance=parity.FLOAT32)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(24))
def test_random_combinations(seed: int) -> None:
    """Recipes, saved tensors and recomputation are drawn beside shared layers, tokens and states, stages and rows."""
    draw = Random(seed)
    sizes = {axis: draw.choice((1, 1, 2)) for axis in ("pp", "dp", "cp", "tp")}
    recipe = draw.choice(("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"))
    pieces: list[Any] = []
    if sizes["tp"] > 1:
        pieces += recipes.tensor_parallel(sequence=draw.random() < 0.5)
    if sizes["cp"] > 1:
        pieces += recipes.context_parallel(attention=draw.choice(("ring", "gather", "heads")))
    schedule = draw.choice(("one_f_one_b", "gpipe", "zb_h1", "zb_h2"))
    pieces += getattr(recipes, schedule)(pp=sizes["pp"], microbatches=draw.choice((2, 3)))
    if draw.random() < 0.5:
        keep = draw.choice(("inputs", "products", "products/2", "attention"))
        pieces.append(piper.recompute(where(layer=draw.choice((0, piper.ANY))), keep=keep))
    shared = tuple(axis for axis in ("dp", "cp") if sizes[axis] > 1)
    if shared:
        pieces += recipes.data_parallel(over=shared, zero=draw.choice((1, 3)))
    saved = draw.choice(("input", "float8"))
    judged(job(recipe, rows=12, saved=saved), Mesh(**sizes), *pieces)


def test_negative_control_another_rounding_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge with the blocks of another recipe differs."""
    blocks = {**reference_float8.BLOCKS, "rowwise": reference_float8.BLOCKS["rowwise_with_gw_hp"]}
    monkeypatch.setattr(reference_float8, "BLOCKS", blocks)
    with pytest.raises(AssertionError, match="not what one device computes"):
        judged(job("rowwise"), Mesh(), THREE)


def test_microbatches_have_scales_of_their_own() -> None:
    """So another number of them trains other numbers, on one device, too."""
    trained = job("tensorwise")
    one, three = (parity.reference(trained, microbatches=m, steps=1) for m in (1, 3))
    assert one.losses != three.losses


# --- refusals


class Two(nn.Module):
    """Two linear layers, one of which no device could multiply in float8."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 48)
        self.second = nn.Linear(48, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def opaque() -> nn.Module:
    """The same with a first layer that autograd runs."""
    model = Two()
    piper.tag(model, {"first": dict(opaque=True)})
    return model


def numbers(step: int, rows: range) -> tuple[Tensor, Tensor]:
    return torch.ones(len(rows), 32, 16), torch.zeros(len(rows), 32, 6)


def square(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def two(float8: Float8, model: Callable[[], nn.Module] = Two, **dtypes: Any) -> Job:
    precision = Precision(**dtypes, float8=float8)
    return Job(model, numbers, square, sgd, global_batch=2, precision=precision)


@each_case(
    ("trained", "message"),
    [
        (two(Float8(keep=("first",))), r"no linear layer multiplies .* \[float8 condition 1\]"),
        (
            two(Float8(), compute="bfloat16", keep={"first.*": "float32"}),
            r"none has features .* \[float8 condition 1\]",
        ),
        (
            two(Float8(modules=("layers.*",))),
            r"is called 'layers\.\*'; the model runs first, second \[float8 condition 2\]",
        ),
        (two(Float8(), opaque), r"first is in an opaque region.*\[float8 condition 3\]"),
        (
            two(Float8("mxfp8")),
            r"a weight \(48, 16\), which blocks of 32 do not divide.*\[float8 condition 4\]",
        ),
    ],
)
def test_what_cannot_be_quantised_is_said(trained: Job, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        piper.compile(trained, Strategy(Mesh(), ()))


@each_case(
    ("float8", "message"),
    [
        (
            "e4m3",
            "one of tensorwise, delayed, rowwise, rowwise_with_gw_hp, blockwise, mxfp8 is needed",
        ),
        (8, "a piper.Float8 is needed, or the name of a recipe"),
    ],
)
def test_fields_of_a_precision_are_checked(float8: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        Precision(float8=float8)


def test_delayed_scales_are_predicted_without_a_pass_and_not_executed() -> None:
    strategy = Strategy(Mesh(tp=2), recipes.tensor_parallel())
    of = {name: piper.compile(job(name), strategy) for name in ("delayed", "tensorwise")}
    delayed, current = (
        simulate(of[name].plan, "h100x2@eager") for name in ("delayed", "tensorwise")
    )
    assert 0.5 * current.step_s < delayed.step_s < current.step_s
    steps = [s for c in of["delayed"].plan.chunks for s in c.steps.values()]
    ops = {k.op for step in steps for k in step.cost.kernels}
    assert {op for op in ops if "float8" in op} == {"float8_cast", "float8_mm"}
    for refused in (
        lambda: piper.execute(of["delayed"], steps=1, launcher="inline"),
        lambda: piper.profile(job("delayed"), strategy),
    ):
        with pytest.raises(JobError, match="predicted only, since scales of earlier steps"):
            refused()


def test_a_device_without_a_rate_of_float8_is_named() -> None:
    plan = piper.compile(two(Float8()), Strategy(Mesh(), ())).plan
    with pytest.raises(ClusterError, match=r"a100-80g-sxm has no FLOP/s for float8"):
        simulate(plan, "a100x1")
    assert simulate(plan, "h100x1").step_s > 0
