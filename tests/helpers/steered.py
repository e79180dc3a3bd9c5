"""A dropless mixture whose tokens choose their experts by their places, so that a test says how many each device
gets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper_capture import region
from piper_ops import grouped_mm, route, unroute

WIDTH, HIDDEN, EXPERTS, TOP, TOKENS, DEVICES = 8, 12, 8, 2, 16, 4
LOADS: dict[str, tuple[int, ...]] = {
    "uniform": (8, 8, 8, 8),
    "1.5": (12, 8, 6, 6),
    "2": (16, 6, 6, 4),
    "all to one": (32, 0, 0, 0),
}
"""Of the 32 choices that a row makes, how many each of 4 devices gets."""
CHOICES = 2 * TOKENS * TOP
"""The choices of the tokens of a device, which has two rows."""


def preferred(load: tuple[int, ...]) -> Tensor:
    """The two experts of each token, so that devices get so many choices; a token's are different."""
    first, second = [], []
    for device, choices in enumerate(load):
        first += [2 * device] * (choices // 2)
        second += [2 * device + 1] * (choices // 2)
    return torch.tensor([first, second]).t().contiguous()


class Steered(nn.Module):
    """A mixture whose tokens choose by their places, and share out by a router, in a dtype of its own if `shares`."""

    shares: torch.dtype | None = None

    def __init__(self, load: tuple[int, ...]) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.down = (
            nn.Parameter(0.3 * torch.randn(EXPERTS, *s)) for s in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))
        )
        self.register_buffer("chosen", preferred(load))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.chosen.expand(x.shape[0], TOKENS, TOP).flatten(0, 1)
        tokens = x.flatten(0, 1)
        share = self.router(tokens).softmax(-1, dtype=self.shares).gather(1, chosen)
        with region(experts=0):
            rows, counts = route(tokens, chosen, EXPERTS)
            made = unroute(
                grouped_mm(F.silu(grouped_mm(rows, counts, self.up)), counts, self.down),
                chosen,
                share,
            )
        return x + made.view_as(x)


class SteeredMixture(nn.Module):
    def __init__(self, load: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Steered(LOADS[load]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    drawn = torch.stack(
        [
            torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(99 * step + r))
            for r in rows
        ]
    )
    return drawn, drawn.roll(1, dims=1)
