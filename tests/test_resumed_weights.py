"""A resumed run has all weights of its checkpoint, also those that nothing trains or uses, in any precision."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.api.compiling import Compiled


class Odd(nn.Module):
    """A frozen weight, a parameter and a buffer that nothing uses, and a buffer that the model reads."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.layers[1].weight.requires_grad_(False)
        self.spare = nn.Parameter(torch.randn(3))
        self.register_buffer("unread", torch.randn(4))
        self.register_buffer("factor", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh() * self.factor.to(x.dtype)
        return x


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))[rows.start : rows.stop]
    return x, x.roll(1, 1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target.float()).square().mean()


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01)


PRECISIONS = {"float32": piper.Precision(), "mixed": piper.Precision(compute="bfloat16")}


@cache
def compiled(precision: str) -> Compiled:
    job = piper.Job(Odd, batch, loss, adamw, global_batch=4, precision=PRECISIONS[precision])
    return piper.compile(job, piper.Strategy(piper.Mesh(dp=2), piper.recipes.data_parallel(zero=1)))


def run(precision: str, steps: int, **options: Any) -> Any:
    return piper.execute(compiled(precision), steps=steps, launcher="inline", **options)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resumed_run_is_one_without_a_pause(precision: str, tmp_path: Path) -> None:
    whole = run(precision, 3)
    run(precision, 2, checkpoint=piper.Checkpoints(tmp_path))
    found = run(precision, 1, checkpoint=piper.Checkpoints(tmp_path), resume="latest")
    a, b = whole.state_dict(), found.state_dict()
    assert found.losses == whole.losses[2:] and a.keys() == b.keys()
    assert [n for n in a if not torch.equal(a[n], b[n])] == []
