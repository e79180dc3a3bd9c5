"""A small job whose model function is given, to see which of its captures a compile uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import piper

WIDTH = 4
ONE = piper.Strategy(piper.Mesh(), (piper.split(piper.where(), microbatches=1),))


class Net(nn.Module):
    def __init__(self, depth: int, scale: float = 1.0) -> None:
        super().__init__()
        self.layers, self.scale = (
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth)),
            scale,
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.linspace(0, 1, 8 * WIDTH).view(8, WIDTH)[rows.start : rows.stop]
    return x, x


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def job(model: Callable[[], Any]) -> piper.Job:
    return piper.Job(model, batch, nn.functional.mse_loss, sgd, global_batch=8)


def depth_of(trained: piper.Job) -> int:
    """Layers of the program that this job runs."""
    return len(piper.compile(trained, ONE).plan.params) // 2
