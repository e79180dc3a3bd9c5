"""A recipe of one's own: GPipe in waves, so that activations do not grow with the number of microbatches.

piper show examples/own_recipe.py --recipe waves --pp 4 --microbatches 8; piper run examples/own_recipe.py --launcher
processes
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

import piper


@piper.recipes.recipe(
    source="this file",
    formula="makespan (m/k)(k + p - 1)(F + B), k = wave; m a multiple of k",
    peak="min(m, k)",
    use="as GPipe, where m microbatches do not fit and k do",
    rule="any pp, microbatches >= 1; wave >= 1",
)
def waves(*, pp: int, microbatches: int, wave: int = 4):
    """All forwards of `wave` microbatches, then their backwards, then the next wave."""
    if wave < 1:
        raise piper.DirectiveError(f"waves(wave={wave}): a wave has at least one microbatch")
    starts = range(0, microbatches, wave)
    phases: tuple[Literal["F", "B"], ...] = ("F", "B")
    steps = [
        (phase, i)
        for s in starts
        for phase in phases
        for i in range(s, min(s + wave, microbatches))
    ]
    action = piper.recipes.Action
    orders = [
        [(action(stage, *step),) for step in steps] for stage in range(pp)
    ]  # a slot is one action, or an overlapped pair
    return piper.recipes.scheduled(orders, microbatches=microbatches)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))[rows.start : rows.stop]
    return x, x.roll(1, dims=1)


job = piper.Job(
    MLP,
    batch,
    nn.functional.mse_loss,
    lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    global_batch=16,
)
strategy = piper.Strategy(piper.Mesh(pp=2), waves(pp=2, microbatches=8, wave=2))
