"""Buffers that advance once per microbatch: named at compile, in `piper explain`, and in what `piper verify` says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import piper
from piper.api.reference.verification import verify_strategy
from piper.views.explained.explain import explain
from piper_ir.ground.errors import CaptureError, PiperWarning

WIDTH = 4


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Buffered(nn.Module):
    """A layer with a buffer that `update(buffer, weight, x)` gives new content, and that the output reads."""

    moving: Tensor

    def __init__(self, update: Callable[[Tensor, Tensor, Tensor], Tensor], in_place: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.register_buffer("moving", torch.ones(WIDTH))
        self.update, self.in_place = update, in_place

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        with torch.no_grad():
            new = self.update(self.moving, self.layers[0].weight, x)
            if self.in_place:
                self.moving.copy_(new)
            else:
                self.moving = new
        return self.layers[1](x * self.moving)


def part_fixed(buffer: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    buffer.mul_(0.9).add_(0.1 * x.mean(0))
    buffer[:1].zero_()
    return buffer.clone()


def from_own_part(buffer: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    buffer[:1].copy_(0.5 * buffer[:1] + 1)
    return buffer.clone()


UPDATES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], bool]] = {
    "counter": (lambda b, w, x: b + 1, True),
    "running mean": (lambda b, w, x: 0.9 * b + 0.1 * x.mean(0), True),
    "last mean": (lambda b, w, x: x.mean(0), True),
    "of a parameter": (lambda b, w, x: w.sum(0), False),
    "running mean with a constant part": (part_fixed, True),
    "of its own part": (from_own_part, True),
    "constant": (lambda b, w, x: torch.full_like(b, 2.0), False),
}
"""Name -> how a buffer is updated, whether it advances."""


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)[rows.start : rows.stop].sin() + 0.1 * step
    return x, x


def job(model: Callable[[], nn.Module]) -> piper.Job:
    def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.1)

    return piper.Job(model, batch, F.mse_loss, sgd, global_batch=8)


def pipeline(microbatches: int) -> piper.Strategy:
    return piper.Strategy(
        piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=microbatches)
    )


@pytest.mark.long
def test_spectral_norm_is_named_at_compile_and_verify_says_what_it_equals() -> None:
    with pytest.warns(PiperWarning, match=r"0\._u.*once per microbatch, 4 times in a step"):
        compiled = piper.compile(job(Spectral), pipeline(4))
    assert "note: forward changes buffers" in explain(compiled)
    with pytest.warns(PiperWarning):
        report = verify_strategy(job(Spectral), pipeline(4))
    assert report.equal, report.text()
    assert (
        "whole batch in one forward: NOT equal (buffers that advance once per microbatch: layers.0"
        in report.text()
    )


@pytest.mark.long
def test_with_one_microbatch_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PiperWarning)
        report = verify_strategy(job(Spectral), pipeline(1))
    assert report.equal and report.whole is None and report.equal_whole_batch


@pytest.mark.sampled(5)
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "replaced"])
@pytest.mark.parametrize("name", UPDATES)
def test_what_is_named_is_what_makes_a_difference(name: str, in_place: bool) -> None:
    update, advances = UPDATES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PiperWarning)
        report = verify_strategy(job(lambda: Buffered(update, in_place)), pipeline(4))
    assert report.equal and report.whole is not None and report.equal_whole_batch is not advances
    assert report.whole.advancing == (("moving",) if advances else ())
    assert bool(report.whole.differences) == advances, report.text()


def test_a_part_that_gets_a_constant_does_not_advance() -> None:
    class Fixed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.register_buffer("fixed", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x) * self.fixed.clone()
            self.fixed[:1].fill_(2.0)
            return y + self.fixed

    with warnings.catch_warnings():
        warnings.simplefilter("error", PiperWarning)
        piper.compile(
            job(Fixed),
            piper.Strategy(piper.Mesh(), (piper.split(piper.where(), microbatches=4),)),
        )


def test_a_loss_that_combines_rows_is_told_apart_too() -> None:
    def contrast(output: Tensor, target: Tensor) -> Tensor:
        return (output - output.mean(0)).square().mean()

    plain = replace(
        job(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH))), loss=contrast, loss_over="microbatch"
    )
    one = piper.Strategy(piper.Mesh(), (piper.split(piper.where(), microbatches=4),))
    report = verify_strategy(plain, one)
    assert report.equal and "NOT equal (the model or the loss combines rows" in report.text()
    with pytest.raises(CaptureError, match="combines rows of the batch"):
        verify_strategy(replace(plain, loss_over="batch"), one)
    assert "equal as well" in verify_strategy(replace(plain, loss=F.mse_loss), one).text()
