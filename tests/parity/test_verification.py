"""What `piper verify` can judge: dropout in several lists of layers; and what it says it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.captures import capturing
from piper.api.reference.reference_differences import Difference
from piper.api.reference.verification import VerificationReport, WholeBatch, verify_strategy
from piper_capture.torch_api import _torch_reuse
from piper_ir.ground.errors import JobError
from tests.helpers.cases import each_case

WIDTH = 4


class Block(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.linear, self.p = nn.Linear(WIDTH, WIDTH), p

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.linear(x)), self.p, self.training)


class TwoLists(nn.Module):
    """Registered in one order, run in the other if `backwards`; dropout in layers, between the lists, before and after
    all."""

    def __init__(self, backwards: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Module(), nn.Module()
        self.encoder.layers = nn.ModuleList(Block() for _ in range(2))
        self.decoder.layers = nn.ModuleList(Block() for _ in range(2))
        self.head, self.backwards = nn.Linear(WIDTH, WIDTH), backwards

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.5, self.training)
        lists = [self.encoder.layers, self.decoder.layers]
        for layers in reversed(lists) if self.backwards else lists:
            for layer in layers:
                x = layer(x)
            x = F.dropout(x, 0.5, self.training)
        return self.head(F.dropout(x * 2, 0.5, self.training))


class Twice(nn.Module):
    """Every layer is visited twice."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(p) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return x


class Nested(nn.Module):
    """A layer that regions cut in two, with dropout in the second half."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.layers, self.p = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Halves(p)]), p

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Halves(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.a, self.b, self.p = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), p

    def forward(self, x: Tensor) -> Tensor:
        with piper.region(half=0):
            x = torch.tanh(self.a(x))
        with piper.region(half=1):
            return F.dropout(self.b(x), self.p, self.training)


class Coarse(nn.Module):
    """Two modules of a list are one layer by the user's word."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(p) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            with piper.region(layer=i // 2):
                x = layer(x)
        return x


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)[rows.start : rows.stop] + step
    return x, x


def job(model: Callable[[], nn.Module], global_batch: int = 8) -> piper.Job:
    def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.1)

    return piper.Job(model, batch, nn.functional.mse_loss, sgd, global_batch=global_batch)


def pipeline(pp: int) -> piper.Strategy:
    return piper.Strategy(piper.Mesh(pp=pp), piper.recipes.gpipe(pp=pp, microbatches=2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backwards", [False, True])
def test_dropout_in_two_lists_of_layers_equals_one_device(backwards: bool) -> None:
    trained = job(lambda: TwoLists(backwards))
    report = verify_strategy(
        trained, piper.Strategy(piper.Mesh(), (piper.split(piper.where(), microbatches=2),))
    )
    assert report.equal, report.text()


def test_partition_cuts_two_lists_into_neighbouring_layers() -> None:
    compiled = piper.compile(job(TwoLists), pipeline(2))
    assert [c.coords["layer"] for c in compiled.plan.chunks if "layer" in c.coords] == [0, 1, 2, 3]
    sends = [i for role in compiled.plan.roles for i in role.program if i.name.startswith("send")]
    assert len(sends) == 4, (
        sends
    )  # an activation and its gradient, for each of two microbatches: the pipeline does not zig-zag


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", [Twice, Nested, Coarse])
def test_dropout_in_parts_of_layers_and_in_layers_that_run_again_equals_one_device(
    model: Any,
) -> None:
    strategy = piper.Strategy(piper.Mesh(), (piper.split(piper.where(), microbatches=2),))
    report = verify_strategy(job(lambda: model(0.5)), strategy)
    assert report.equal and report.equal_whole_batch, report.text()


class SameMask(nn.Module):
    """The difference of two dropouts of ones by one layer: zero where both draw the same mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Dropout(0.5)])
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](torch.ones_like(x) * self.weight)
        with piper.region(between=1):
            ones = first * 0 + self.weight
        return first - self.layers[0](ones)


def test_a_second_chunk_of_a_layer_draws_another_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = replace(job(SameMask), loss=lambda output, target: output.square().mean())
    compiled = piper.compile(
        trained, piper.Strategy(piper.Mesh(), (piper.split(piper.where(), microbatches=1),))
    )
    assert [c.id for c in compiled.plan.chunks if c.random] == ["layer0", "between1_layer0"]
    assert piper.execute(compiled, steps=1, launcher="inline").losses[0] > 0
    monkeypatch.setattr("piper_ops.random.draws.key_of", lambda text: (1, 3))
    assert piper.execute(compiled, steps=1, launcher="inline").losses[0] == 0


def test_a_batch_function_that_raises_is_named_with_its_line() -> None:
    def gone(step: int, rows: range) -> Any:
        raise FileNotFoundError("data.bin")

    where = rf"test_verification.py:{gone.__code__.co_firstlineno + 1}\)"
    with pytest.raises(
        JobError,
        match=rf"Job\.batch\(step=0, rows=range\(0, 2\)\) raised FileNotFoundError: data.bin "
        rf"\(.*{where}",
    ):
        piper.compile(replace(job(Block), batch=gone), pipeline(1))


def test_a_job_of_one_row_compiles() -> None:
    one = piper.Strategy(piper.Mesh(), (piper.split(piper.where(), microbatches=1),))

    def single(step: int, rows: range) -> tuple[Tensor, Tensor]:
        x = torch.ones(1, WIDTH)[rows.start : rows.stop]
        return x, x

    trained = piper.Job(
        lambda: Block(0.0), single, nn.functional.mse_loss, job(Block).optimizer, global_batch=1
    )
    assert piper.compile(trained, one).plan.rows == 1


@each_case(
    ("meant", "different", "equal"),
    [(True, True, True), (False, True, False), (False, False, True)],
)
def test_another_result_for_the_whole_batch_is_a_failure_unless_the_job_asks_for_it(
    meant: bool, different: bool, equal: bool
) -> None:
    found = [Difference(0, "loss", -1, "", "1.0, one device has 2.0")] * different
    strategy = piper.Strategy(piper.Mesh(), [])
    report = VerificationReport(strategy, 1, 1, [], WholeBatch(found, meant=meant))
    assert (
        report.equal is equal
        and report.equal_whole_batch is not different
        and ("NOT equal" in report.text()) is different
    )


class Scaled(Block):
    def __init__(self, scale: float) -> None:
        super().__init__(0.0)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled(1.0 + k) for k in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_trace_that_served_a_layer_of_another_kind_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal layers share a trace, where a check says that they are equal; here the check is told to say so always."""
    job = piper.Job(
        model=Stack,
        batch=lambda step, rows: (
            torch.ones(len(rows), WIDTH) * (1 + step),
            torch.zeros(len(rows)),
        ),
        loss=lambda y, target: F.mse_loss(y.mean(1), target),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        global_batch=2,
    )
    strategy = piper.Strategy(piper.Mesh(pp=1), piper.recipes.gpipe(pp=1, microbatches=2))
    assert verify_strategy(job, strategy).equal
    monkeypatch.setattr(_torch_reuse._Trace, "holds", lambda *args: True)
    monkeypatch.setattr(capturing, "_CAPTURES", {})
    assert not verify_strategy(replace(job, model=lambda: Stack()), strategy).equal
