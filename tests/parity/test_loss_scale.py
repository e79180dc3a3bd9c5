"""Protect scaled losses: with any scale a plan trains what torch's GradScaler trains on one device, skipped steps too."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import Checkpoints, Job, LossScale, Mesh, Precision, Strategy, recipes
from piper_ir.ground.errors import CaptureError, JobError, NonFiniteLossError
from piper_ir.program.ops import Seed, Update
from piper_ir.verify import check
from tests.helpers import parity
from tests.helpers.memory_judge import lies
from tests.helpers.plan_edits import every_part, first_part, with_op

ROWS, STEPS = 8, 5
FLOAT16 = 5e-3
SCALE = LossScale(initial=2.0**16, backoff=0.25, interval=2)
SKIPPED = [False, True, False, False, False]
SCALES = [2.0**16, 2.0**16, 2.0**14, 2.0**14, 2.0**15]
PLANS = {
    "dp": Strategy(Mesh(dp=2), recipes.data_parallel(zero=2)),
    "tp": Strategy(Mesh(tp=2), [piper.shard(piper.where(), over="tp")]),
    "pp": Strategy(Mesh(pp=2), recipes.one_f_one_b(pp=2, microbatches=2)),
}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    """The second step has a row whose loss is finite, and whose gradient is not."""
    x, y = torch.randn(2, ROWS, 16, generator=torch.Generator().manual_seed(step)).unbind()
    y[3, 0] *= step != 1
    return x[rows.start : rows.stop], y[rows.start : rows.stop]


def losses(output: Tensor, targets: Tensor) -> Tensor:
    squares = (output.to(targets.dtype) - targets).square().mean(1)
    return squares + (output.to(targets.dtype).square().mean(1) * targets[:, 0].abs()).sqrt()


def mean(output: Tensor, targets: Tensor) -> Tensor:
    return losses(output, targets).mean()


def weighted(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return losses(output, targets).sum(), (targets[:, 1] > 0).sum()


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.5)


def job(precision: Precision, **more: Any) -> Job:
    return Job(
        Layers, batch, more.pop("loss", mean), sgd, global_batch=ROWS, precision=precision, **more
    )


def trained(source: Job, strategy: Strategy, **more: Any) -> tuple[Any, list[Any]]:
    """A run, and the records of its steps."""
    records: list[Any] = []
    compiled = piper.compile(source, strategy)
    options = dict(
        steps=STEPS, launcher="inline", gradients=True, memory=True, on_step=records.append
    )
    return piper.execute(compiled, **{**options, **more}), records


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("loss", "clip"), [(mean, None), (weighted, 0.5)])
def test_a_scaled_run_is_that_of_one_device(plan: str, loss: Any, clip: float | None) -> None:
    source = job(Precision("float64", loss_scale=SCALE), loss=loss, clip_norm=clip)
    run, records = trained(source, PLANS[plan])
    parity.assert_parity(run, parity.reference(source, steps=STEPS))
    assert [r.skipped for r in records] == SKIPPED
    assert [r.loss_scale for r in records] == SCALES
    assert [r.gradient_norm is None for r in records] == [r.skipped for r in records]
    assert not lies(piper.compile(source, PLANS[plan]).plan, dict(run.memory))


def test_processes_skip_alike() -> None:
    source = job(Precision("float64", loss_scale=SCALE))
    run, records = trained(source, PLANS["dp"], launcher="processes", memory=False)
    parity.assert_parity(run, parity.reference(source, steps=STEPS))
    assert [r.skipped for r in records] == SKIPPED


@pytest.mark.parametrize("plan", ["dp", "pp"])
def test_float16_is_as_near_as_it_is_on_one_device(plan: str) -> None:
    """The first scales overflow float16; without a scale small gradients would vanish."""
    scale = LossScale(initial=2.0**26, backoff=2.0**-6, interval=2)
    source = job(Precision(compute="float16", loss_scale=scale))
    run, records = trained(source, PLANS[plan])
    parity.assert_parity(run, parity.reference(source, steps=STEPS), FLOAT16)
    assert any(r.skipped for r in records) and not all(r.skipped for r in records)
    assert not lies(piper.compile(source, PLANS[plan]).plan, dict(run.memory))


def test_a_checkpoint_has_the_scale(tmp_path: Path) -> None:
    """A run that was ended after two steps and goes on under another strategy has the scales of one that was not."""
    source = job(Precision("float64", loss_scale=SCALE))
    whole, _ = trained(source, PLANS["dp"])
    kept = Checkpoints(tmp_path, every=2)
    trained(source, PLANS["dp"], steps=2, checkpoint=kept)
    rest, records = trained(source, PLANS["pp"], steps=3, checkpoint=kept, resume="latest")
    assert [r.loss_scale for r in records] == SCALES[2:]
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-12)


def test_an_overflow_at_the_least_scale_ends_the_run() -> None:
    least = LossScale(initial=4.0, least=4.0)
    with pytest.raises(NonFiniteLossError, match=r"not finite, and the loss is scaled by 4,"):
        trained(job(Precision("float64", loss_scale=least)), PLANS["pp"])


def test_a_plan_that_scales_in_places_only_is_refused() -> None:
    source = job(Precision("float64", loss_scale=2.0), clip_norm=1.0)
    plan = piper.compile(source, PLANS["pp"]).plan
    assert not check(plan)
    for kind, edit in (
        (Seed, first_part),
        (Update, first_part),
        (Update, every_part),
        (Seed, every_part),
    ):
        damaged = edit(
            plan,
            lambda role, part, kind=kind: isinstance(part.op, kind),
            lambda part: with_op(part, scaled=False),
        )
        assert damaged is not None
        assert "R26-scale" in {finding.rule for finding in check(damaged)}, (kind, edit)


def test_a_plan_of_another_job_is_refused() -> None:
    plain = job(Precision("float64"))
    compiled = piper.compile(plain, PLANS["dp"])
    with pytest.raises(JobError, match="the plan does not scale the loss"):
        piper.execute(
            replace(compiled, job=job(Precision("float64", loss_scale=2.0))),
            steps=1,
            launcher="inline",
        )


def of_classes(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over the rows with a class; the batch decides their number."""
    return F.cross_entropy(output.float(), classes(targets))


def of_pairs(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    own = classes(targets)
    return F.cross_entropy(output.float(), own, reduction="sum"), (own >= 0).sum()


def classes(targets: Tensor) -> Tensor:
    return torch.where(targets[:, 1] > 1, -100, targets.argmax(1))


@pytest.mark.parametrize("loss", [of_classes, of_pairs])
@pytest.mark.parametrize("plan", PLANS)
def test_the_scale_multiplies_the_mean_and_not_the_sum(plan: str, loss: Any) -> None:
    """Return to the scales of a loop with torch's GradScaler: at the first ones a sum would overflow, too."""
    scale = LossScale(initial=2.0**18, interval=3)
    source = job(Precision(compute="float16", loss_scale=scale), loss=loss)
    _, records = trained(source, PLANS[plan])
    expected = scales_of_a_loop(scale)
    assert [r.loss_scale for r in records] == expected[0]
    assert [r.skipped for r in records] == expected[1]
    assert any(expected[1]) and not all(expected[1])


def scales_of_a_loop(scale: LossScale) -> tuple[list[float], list[bool]]:
    """Return the scale of each step, and whether it was skipped, on one device in plain torch."""
    torch.manual_seed(job(Precision()).seed)
    model = Layers()
    optimizer = sgd(list(model.named_parameters()))
    scaler = torch.amp.GradScaler(
        "cpu", scale.initial, scale.growth, scale.backoff, growth_interval=scale.interval
    )
    scales, skipped = [], []
    for step in range(STEPS):
        x, y = batch(step, range(ROWS))
        half = copy.deepcopy(model).half()
        scales.append(scaler.get_scale())
        scaler.scale(of_classes(half(x.half()), y)).backward()
        for master, copied in zip(model.parameters(), half.parameters(), strict=True):
            master.grad = None if copied.grad is None else copied.grad.float()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.get_scale() < scales[-1])
    return scales, skipped


def test_a_divisor_of_the_model_is_refused_beside_a_scale() -> None:
    """The scale would multiply the sum."""

    def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return losses(output, targets).sum(), output.detach().abs().sum()

    with pytest.raises(CaptureError, match="which it may not beside a scale of the loss"):
        piper.compile(job(Precision("float64", loss_scale=2.0), loss=loss), PLANS["dp"])
    piper.compile(job(Precision("float64"), loss=loss), PLANS["dp"])
