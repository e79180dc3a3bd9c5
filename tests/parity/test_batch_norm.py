"""Batch statistics of microbatches: equal to gradient accumulation in plain PyTorch, or refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper.api.reference.reference import reference
from piper.api.reference.reference_differences import RunOutcome, differences
from piper.views.explained.explain import explain
from piper_ir.ground.errors import CaptureError, CompileError, JobError, PiperWarning
from tests.helpers.cases import each_case

ROWS, STEPS, SIZE = 16, 3, 3
Named = list[tuple[str, nn.Parameter]]


class Residual(nn.Module):
    """A stem, layers with batch norms of images, and a head with one of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
            for _ in range(4)
        )
        self.head = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


def images(step: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 2, SIZE, SIZE, generator=generator, dtype=torch.float64) + 2.0
    y = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    return x[rows.start : rows.stop], y[rows.start : rows.stop]


def sgd(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9)


def squares(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().mean()


def job(
    model: Callable[[], nn.Module] = Residual, batch: Any = images, **options: Any
) -> piper.Job:
    given = (
        dict(
            batch_norm="microbatch", precision=piper.Precision(params="float64"), global_batch=ROWS
        )
        | options
    )
    return piper.Job(model, batch, squares, sgd, **given)


def recipe(name: str, pp: int, m: int, zero: int = 0) -> tuple[Any, ...]:
    return (
        *getattr(piper.recipes, name)(pp=pp, microbatches=m),
        *piper.recipes.data_parallel(zero=zero),
    )


def check(
    of: piper.Job, directives: tuple[Any, ...], pp: int = 2, dp: int = 1, launcher: str = "inline"
) -> piper.Compiled:
    """Train by a plan and by plain PyTorch with the same microbatches; compare all numbers, and memory with the
    plan."""
    compiled = piper.compile(of, piper.Strategy(piper.Mesh(pp=pp, dp=dp), directives))
    run = piper.execute(compiled, steps=STEPS, launcher=launcher, gradients=True)
    plan = compiled.plan
    expected = reference(of, replicas=plan.replicas, microbatches=plan.microbatches, steps=STEPS)
    assert not differences(RunOutcome.of(run), expected)
    assert run.peak_bytes == {r: role.peak_bytes for role in plan.roles for r in role.ranks}
    return compiled


QUICK = ("one_f_one_b", "interleaved")
OTHERS = [n for n in piper.recipes.RECIPES if n not in (*QUICK, "dualpipe")]
SCHEDULES = [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_equals_gradient_accumulation(name: str) -> None:
    check(job(), recipe(name, 2, 4))


@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.long)])
def test_replicas_have_statistics_of_their_own_and_those_of_replica_0_count(zero: int) -> None:
    compiled = check(job(), recipe("one_f_one_b", 2, 2, zero), dp=2)
    said = explain(compiled)
    assert "batch statistics (" in said and "of each microbatch of 4 rows on its replica" in said
    assert "running averages are of replica 0 of 2, in the order of microbatches" in said


@pytest.mark.parametrize(
    ("name", "keep"),
    [("one_f_one_b", "inputs"), pytest.param("zbv", "products", marks=pytest.mark.long)],
)
def test_statistics_are_updated_once_under_recomputation(name: str, keep: str) -> None:
    compiled = check(job(), (*recipe(name, 2, 4), piper.recompute(piper.where(), keep)))
    assert any(v.steps for v in compiled.plan.variants)


def test_it_is_the_loop_that_people_write() -> None:
    torch.manual_seed(0)
    model = Residual().double()
    optimizer = sgd(list(model.named_parameters()))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for i in range(4):
            x, y = images(step, range(4 * i, 4 * i + 4))
            loss = squares(model(x), y) / 4
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    compiled = piper.compile(job(), piper.Strategy(piper.Mesh(pp=2), recipe("one_f_one_b", 2, 4)))
    run = piper.execute(compiled, steps=STEPS, launcher="inline", memory=False)
    assert run.losses == pytest.approx(losses, rel=1e-12)
    found = run.state_dict()
    assert int(found["layers.0.1.num_batches_tracked"]) == 4 * STEPS
    for name, tensor in model.state_dict().items():
        assert torch.allclose(found[name].double(), tensor.double(), rtol=1e-9, atol=1e-12), name


class Kinds(nn.Module):
    """Batch norms in the ways in which they are written, one of them run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.volume = nn.BatchNorm3d(2, momentum=0.3)
        self.plain = nn.BatchNorm1d(2, affine=False)
        self.loose = nn.BatchNorm1d(2, track_running_stats=False, eps=0.1)
        self.still = nn.BatchNorm1d(2).eval()
        self.linear, self.last = nn.Linear(2, 2), nn.Linear(2, 3)
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("spread", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.volume(x[..., None]).flatten(2).mean(2)
        x = self.linear(self.plain(self.plain(x).tanh())).exp()
        x = self.still(F.batch_norm(x, self.average, self.spread, training=True).exp())
        out: torch.Tensor = self.last(self.loose(x).exp())
        return out


@pytest.mark.long
def test_every_kind_of_batch_norm() -> None:
    check(job(Kinds), (piper.split(piper.where(), microbatches=4),), pp=1)


@pytest.mark.long
def test_narrow_inputs_have_statistics_in_float32() -> None:
    given = job(Residual, precision=piper.Precision(params="float32", compute="bfloat16"))
    compiled = piper.compile(
        given, piper.Strategy(piper.Mesh(), (piper.split(piper.where(), microbatches=2),))
    )
    run = piper.execute(compiled, steps=STEPS, launcher="inline")
    assert run.peak_bytes == {0: compiled.plan.roles[0].peak_bytes}
    wide = reference(
        replace(given, precision=piper.Precision(params="float64")), microbatches=2, steps=STEPS
    )
    for name in ("layers.0.1.running_mean", "layers.0.1.running_var"):
        found = run.state_dict()[name]
        assert found.dtype is torch.float32 and torch.allclose(
            found.double(), wide.buffers[name], rtol=0.02, atol=0.01
        ), name


def test_a_run_goes_on_with_the_statistics_of_replica_0(tmp_path: Path) -> None:
    of, saved = job(), piper.Checkpoints(tmp_path, every=1)
    wide = piper.compile(of, piper.Strategy(piper.Mesh(pp=2, dp=2), recipe("one_f_one_b", 2, 2)))
    piper.execute(wide, steps=2, launcher="inline", checkpoint=saved, memory=False)
    run = piper.execute(
        wide, steps=1, launcher="inline", checkpoint=saved, resume="latest", memory=False
    )
    expected = reference(of, replicas=2, microbatches=2, steps=3)
    assert all(
        torch.allclose(run.state_dict()[n], b, rtol=1e-9) for n, b in expected.buffers.items()
    )


class Moving(nn.Module):
    """A moving average of what passes, which forward may read."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.linear, self.read = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 3)), read
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x.mean((2, 3)))
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.average if self.read else x


class Writes(Moving):
    def __init__(self) -> None:
        super().__init__(read=False)


class Reads(Moving):
    def __init__(self) -> None:
        super().__init__(read=True)


@pytest.mark.long
@pytest.mark.parametrize(("model", "dp"), [(Writes, 1), (Writes, 2), (Reads, 1)])
def test_other_buffers_that_a_forward_updates(model: Callable[[], nn.Module], dp: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PiperWarning)  # it was chosen, so nothing is said
        check(job(model), recipe("gpipe", 1, 2), pp=1, dp=dp)


def compiled(of: piper.Job, *directives: Any, **mesh: int) -> piper.Compiled:
    return piper.compile(of, piper.Strategy(piper.Mesh(**mesh), directives))


@pytest.mark.long
def test_a_buffer_that_forward_reads_has_no_replicas() -> None:
    with pytest.raises(
        CompileError,
        match=r"buffer 'average' is updated from the batch .* forward reads it beside that",
    ):
        compiled(job(Reads), *recipe("gpipe", 1, 2), dp=2)


@pytest.mark.long
def test_without_the_choice_the_error_names_it() -> None:
    with pytest.raises(
        CompileError,
        match=r"'average' is updated from the batch .*Job\(batch_norm=\"microbatch\"\) lets them",
    ):
        compiled(job(Writes, batch_norm=None), *recipe("gpipe", 1, 1), dp=2)


def test_without_the_choice_it_is_refused_with_this_way_out() -> None:
    with pytest.raises(
        CaptureError,
        match=r"batch_norm: batch statistics "
        r'.*test_batch_norm.py:\d+.*Job\(batch_norm="microbatch"\)',
    ):
        compiled(job(batch_norm=None))
    with pytest.raises(
        JobError, match=r"Job\(batch_norm='batch'\): \"microbatch\" is needed, or None"
    ):
        job(batch_norm="batch")


class Synchronised(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 3), nn.SyncBatchNorm(3) if norm is None else norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.linear(x.mean((2, 3))))
        return out


class Opaque(Synchronised):
    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(3, track_running_stats=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x.mean((2, 3)))
        with piper.region(part=1, opaque=True):
            return squashed(self.norm, x)


def squashed(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = norm(x).sigmoid()
    return out


def cumulative() -> nn.Module:
    return Synchronised(nn.BatchNorm1d(3, momentum=None))


@each_case(
    ("model", "says"),
    [
        (
            Synchronised,
            r"norm is SyncBatchNorm, .* all replicas, .*use nn.BatchNorm2d .*Job\(batch_norm",
        ),
        (
            Opaque,
            r"batch_norm: batch statistics inside an opaque region, .*\. Leave it outside of the "
            r"region",
        ),
        (cumulative, r"norm is BatchNorm1d\(momentum=None\), .* give it a momentum"),
    ],
)
def test_other_statistics_are_refused(model: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        compiled(job(model))


def test_devices_do_not_share_batch_statistics() -> None:
    with pytest.raises(
        CompileError,
        match=r"shard: the model takes batch statistics \(.*leave shard out, or use LayerNorm",
    ):
        compiled(job(), piper.shard(piper.where()), tp=2)


@pytest.mark.long
def test_statistics_of_one_value_are_refused() -> None:
    with pytest.raises(
        CompileError,
        match=r"one value per channel \(.*test_batch_norm.py:\d+\): a microbatch has 1 row",
    ):
        compiled(job(), piper.split(piper.where(), microbatches=ROWS))


def test_stages_on_two_devices_have_no_one_average() -> None:
    with pytest.raises(
        CompileError, match=r"buffer 'layers.*' is updated in .* whose copies would differ"
    ):
        compiled(job(), *recipe("dualpipe", 2, 4), pp=2)


@pytest.mark.long
def test_replicas_in_processes() -> None:
    check(job(), recipe("one_f_one_b", 2, 2), dp=2, launcher="processes")
