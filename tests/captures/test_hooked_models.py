"""Hooks that a model's author wrote as functions inside of others, and gradients that a backward changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.reference.verification import verify_strategy
from piper_capture.module import model as capture_model
from piper_ir.ground.errors import CaptureError
from tests.helpers.capture_jobs import sgd

WIDTH = 8


class Features(nn.Module):
    """A head on what hooks took out of the layers of a body, and a parameter that a hook reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale, self.taken = nn.Parameter(torch.ones(())), dict[str, Tensor]()
        for name, layer in self.layers.named_children():
            layer.register_forward_hook(self.keeping(name))
        self.layers[1].register_forward_hook(lambda module, inputs, output: output * self.scale)
        self.layers[1].register_forward_pre_hook(
            lambda module, inputs, own=self.layers: (own[0](inputs[0]),)
        )
        self.head = nn.Linear(2 * WIDTH, WIDTH)

    def keeping(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.taken[name] = output

        return keep

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x + self.head(torch.cat([self.taken["0"], self.taken["1"]], -1))


class Held(nn.Module):
    """Functions that refer to their model, in a partial and in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(()))
        self.layers[0].register_forward_hook(
            partial(lambda factor, module, inputs, output: output * self.scale * factor, 2.0)
        )
        self.steps = [lambda x: x * self.scale, {"last": (lambda x: self.head(x),)}]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        first, rest = self.steps
        return rest["last"][0](first(x))  # type: ignore[operator,index,no-any-return]  # a list of both kinds


class Clamped(nn.Module):
    """A backward that is not linear in the gradient that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return x


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(step))[
        rows.start : rows.stop
    ]
    return x, x.sin()


TWO = piper.Strategy(piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=3))


def job(model: type[nn.Module]) -> piper.Job:
    return piper.Job(model, batch, F.mse_loss, sgd, global_batch=12)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", [Features, Held, Clamped])
def test_equal_to_one_device(model: type[nn.Module]) -> None:
    """A plan gives each microbatch its share of the loss, as `(loss / microbatches).backward()` does."""
    report = verify_strategy(job(model), TWO, steps=2)
    assert report.equal, report.text()


def test_hooks_that_are_left_as_they_are_read_another_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The negative control: without new functions the copy of the model that is captured is not the one that they
    know."""
    monkeypatch.setattr(capture_model, "rebind_functions", lambda *_: None)
    with pytest.raises(CaptureError):
        piper.compile(job(Features), TWO)
