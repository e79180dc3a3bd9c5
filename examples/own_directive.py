"""A directive of one's own: at most so many microbatches in flight on a stage, which bounds its activations.

piper explain examples/own_directive.py; piper verify examples/own_directive.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import piper


@piper.directive  # so that strategies with it can be saved and read back
@dataclass(frozen=True)
class InFlight:
    """The forward of microbatch i + most runs after the backward of microbatch i.

    Legality: 1. `most` is at least 1. 2. The batch is split, and into more than `most` microbatches."""

    selection: piper.Where
    most: int
    site: str = piper.site_field()

    def check(self, graph):
        if self.most < 1:
            raise piper.fail(self, 1, "at least one microbatch has to be in flight")
        if graph.microbatches <= self.most:
            raise piper.fail(
                self, 2, f"there are {graph.microbatches} microbatches; nothing would be ordered"
            )

    def apply(self, graph):
        edit = graph.edit()
        for node in graph.select(self.selection):
            later = f"{node.coords['chunk']}.F@{node.mb + self.most}"
            if node.coords["phase"] == "B" and later in graph.nodes:
                edit.order(node.id, later)
        return edit.done()


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
strategy = piper.Strategy(
    piper.Mesh(pp=2),
    (piper.recipes.pipeline(pp=2, microbatches=8), InFlight(piper.where(stage=0), 1)),
)
