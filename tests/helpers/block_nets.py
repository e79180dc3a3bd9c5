"""A net of blocks on short sequences, and its batches, for tests that put their own blocks into it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

ROWS, LENGTH, WIDTH, CLASSES = 8, 3, 8, 3


class BlockNet(nn.Module):
    """Blocks between an embedding, which may be left out, and a head."""

    def __init__(self, blocks: Iterable[nn.Module], embed: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH) if embed else nn.Identity()
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean(1)  # type: ignore[no-any-return]  # modules have no types


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    made = torch.randn(
        ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64
    )
    x = made[rows.start : rows.stop]
    return x, (x[:, 0, 0] * 10).long() % CLASSES
