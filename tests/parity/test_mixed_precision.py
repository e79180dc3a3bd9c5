"""Protect mixed precision by exact witnesses (sums, small steps, rounded copies) and against torch's own bfloat16.

The mixed path against a plain loop with the same casts is in test_compositions.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import Job, Mesh, Precision, Strategy, models
from piper_ir.program.ops import Update
from piper_ir.verify import verify
from piper_runtime.rank.binding.rank import Binder, Rank
from piper_runtime.rank.values.store import Store
from tests.helpers import compositions, parity
from tests.helpers.compositions import Composition, fitted
from tests.helpers.memory_judge import lies

BF16 = Precision(params="float32", compute="bfloat16", reduce="float32")

CASES = (
    Composition("gpt", 2, 2, 4, "1f1b", bucket_mb=0.002),
    Composition("gpt", 2, 2, 4, "1f1b", "shared", bucket_mb=0.002),
    Composition("keywords", 2, 2, 4, "1f1b", rows=1, clip=0.05),
    Composition("skip", 4, 1, 4, "gpipe"),
)


def mixed(c: Composition) -> Composition:
    return fitted(replace(c, precision="mixed"))


def test_negative_control_the_tolerance_tells_float32_from_bfloat16() -> None:
    c = mixed(CASES[0])
    rough = replace(
        compositions.job_of(c), precision=Precision(params="float64", compute="bfloat16")
    )
    other = parity.reference(rough, replicas=c.dp, microbatches=c.microbatches)
    found = parity.differences(parity.RunOutcome.of(compositions.run(c)), other, parity.FLOAT32)
    assert len(found) > len(other.trained)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["rmsprop", "adamw"])
def test_gradients_that_are_cast_for_the_update_are_in_the_plan(optimizer: str) -> None:
    """Those of an optimizer that goes from parameter to parameter are as large as these, without the room between
    them."""
    c = Composition(
        "gpt_untied", microbatches=2, optimizer=optimizer, bucket_mb=0.002, precision="narrow sums"
    )
    plan = compositions.compiled(c).plan
    found = lies(
        plan, dict(compositions.run(c, plan, steps=2, gradients=False, memory=True).memory)
    )
    assert not found, "\n".join(found[:6])


# --- exact witnesses


class Line(nn.Module):
    """The product of the input and one weight."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.0, count + 1)[:-1])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=STEP)


STEP = 5e-4
"""A learning rate: with a gradient of 1, less than half an ulp of bfloat16 between 0.5 and 1, which is 2 ** -9."""
LARGE = torch.tensor([[256.0], [1.0], [-256.0]])


def large_and_small(step: int, rows: range) -> tuple[Tensor, Tensor]:
    return LARGE[rows.start : rows.stop], torch.tensor([1.0, 0.0, 0.0])[rows.start : rows.stop]


def weighted(output: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return output.sum(), weights.sum()


def run_of(job: Job, strategy: Strategy, steps: int) -> Any:
    compiled = piper.compile(job, strategy)
    verify(compiled.plan)
    return piper.execute(compiled, steps=steps, launcher="inline", gradients=True, memory=False)


@pytest.mark.parametrize(("axes", "microbatches"), [({}, 3), ({"dp": 3}, 1)])
@pytest.mark.parametrize(("reduce", "gradient"), [("float32", 1.0), ("bfloat16", 0.0)])
def test_256_and_1_less_256_is_1(
    axes: dict[str, int], microbatches: int, reduce: str, gradient: float
) -> None:
    """The sum is 0 in bfloat16, which has no 257."""
    precision = Precision(params="float32", compute="bfloat16", reduce=reduce)
    job = Job(Line, large_and_small, weighted, sgd, global_batch=3, precision=precision)
    pieces = (
        piper.split(piper.where(), microbatches=microbatches),
        *(piper.recipes.data_parallel() if axes else ()),
    )
    run = run_of(job, Strategy(Mesh(**axes), pieces), 1)
    assert run.gradients[0]["weight"].tolist() == [gradient]


def ones(step: int, rows: range) -> tuple[Tensor, Tensor]:
    return torch.ones(len(rows), 64), torch.zeros(len(rows))


def mean(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).mean()


def moved(precision: Precision) -> tuple[Tensor, Tensor]:
    """The parameters after 100 small steps, and at their start."""
    job = Job(lambda: Line(64), ones, mean, sgd, global_batch=4, precision=precision)
    run = run_of(
        job,
        Strategy(
            Mesh(dp=2), (piper.split(piper.where(), microbatches=2), *piper.recipes.data_parallel())
        ),
        100,
    )
    state = run.state_dict()["weight"]
    return state, Line(64).weight.detach().to(state.dtype)


def test_steps_below_half_an_ulp_move_parameters_as_float32_does() -> None:
    found, start = moved(BF16)
    assert found.dtype == torch.float32 and bool((found != start).all())
    assert torch.equal(found, moved(Precision(params="float32"))[0])


def test_negative_control_without_a_master_none_moves() -> None:
    found, start = moved(Precision(params="bfloat16"))
    assert torch.equal(found, start)


@contextmanager
def watched(seen: Callable[[int, Store], None]) -> Iterator[None]:
    """Show the store of every rank behind each of its updates."""
    correct = Rank.binder

    def part(p: Any, rank: Any) -> Any:
        run = correct.part(p, rank)
        if not isinstance(p.op, Update):
            return run

        def update() -> None:
            run()
            seen(rank.rank, rank.store)

        return update

    Rank.binder = Binder(part, correct.operand, correct.instr)
    try:
        yield
    finally:
        Rank.binder = correct


@pytest.mark.parametrize("c", [CASES[0], pytest.param(CASES[1], marks=pytest.mark.long)], ids=str)
def test_copies_are_the_rounded_masters_and_equal_on_all_ranks_after_every_step(
    c: Composition,
) -> None:
    c = fitted(replace(c, precision="bfloat16 mixed"))
    after: dict[int, list[dict[str, Tensor]]] = {}

    def seen(rank: int, store: Store) -> None:
        for name, master in store.masters.items():
            assert store.params[name].dtype == torch.bfloat16 and master.dtype == torch.float32
            assert torch.equal(store.params[name], master.bfloat16())
        after.setdefault(rank, []).append({n: store.masters[n].clone() for n in store.masters})

    with watched(seen):
        compositions.run(c)
    assert len(after) == c.pp * c.dp and all(len(steps) == parity.STEPS for steps in after.values())
    held: dict[tuple[int, str], Tensor] = {}
    for steps in after.values():
        for step, masters in enumerate(steps):
            for name, master in masters.items():
                assert torch.equal(held.setdefault((step, name), master), master), (
                    f"{name} after step {step}"
                )
    assert any(not torch.equal(held[0, name], held[1, name]) for _, name in held)


# --- bfloat16 against float64: no worse than torch's own

SIZES = {
    "gpt": models.GPTConfig(layers=4, width=64, heads=4, vocab=256, length=32),
    "llama": models.LlamaConfig(
        layers=4, width=64, heads=4, kv_heads=2, hidden=128, vocab=256, length=32
    ),
    "moe": models.MoEConfig(
        layers=4,
        width=64,
        heads=4,
        kv_heads=2,
        hidden=64,
        vocab=256,
        length=32,
        experts=4,
        top_k=2,
        capacity_factor=2.0,
    ),
}
MICROBATCHES = 4


@cache
def ratios(name: str) -> list[float]:
    """Return each parameter's error of the gradient over that of plain torch in bfloat16, both against float64."""
    work = models.job(SIZES[name], global_batch=8)
    exact = parity.reference(
        replace(work, precision=Precision(params="float64")), microbatches=MICROBATCHES, steps=1
    )
    plain = parity.reference(work, microbatches=MICROBATCHES, steps=1)
    run = run_of(
        work, Strategy(Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=MICROBATCHES)), 1
    )

    def error(found: Tensor, truth: Tensor) -> float:
        return float((found.double() - truth).norm() / truth.norm())

    truth = exact.gradients[0]
    return [
        error(run.gradients[0][n], t) / error(plain.gradients[0][n], t) for n, t in truth.items()
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt", "llama", pytest.param("moe", marks=pytest.mark.long)])
def test_gradients_of_bfloat16_are_as_good_as_torchs(name: str) -> None:
    assert median(ratios(name)) <= 1.05
    assert max(ratios(name)) <= 1.3


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_fifty_steps_have_the_losses_of_float64(name: str) -> None:
    """A loop in plain torch is off by half a percent: its losses are rounded to bfloat16."""
    config = replace(SIZES[name], layers=2, width=32)
    work = models.job(config, global_batch=8, lr=1e-3)
    fixed = replace(work, batch=lambda step, rows: work.batch(step % 2, rows))
    exact = parity.reference(
        replace(fixed, precision=Precision(params="float64")), microbatches=2, steps=50
    )
    run = run_of(fixed, Strategy(Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=2)), 50)
    assert run.losses[-1] < 0.9 * run.losses[0], "it learns"
    assert all(abs(a - b) <= 2e-3 * b for a, b in zip(run.losses, exact.losses, strict=True))
