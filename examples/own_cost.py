"""Durations of one's own: a prediction for hardware that is not there, from a table instead of a formula.

python examples/own_cost.py writes own_costs.json; piper simulate examples/own_cost.py --costs own_costs.json uses it
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import piper


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
strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.zb_h1(pp=2, microbatches=8))

SECONDS = {"F": 1e-3, "I": 1.2e-3, "W": 0.8e-3}
"""Of one layer and one microbatch of 2 rows, as a vendor might promise them."""


def costs() -> piper.Costs:
    """Every layer takes what the table says, at the rows of this strategy; "table" is printed as the source. What it
    does not hold (the loss, the optimizer, messages) keeps the cluster's formula."""
    plan = piper.compile(job, strategy).plan
    given = {step: piper.Duration(seconds, "table") for step, seconds in SECONDS.items()}
    return piper.Costs(
        {chunk.id: given for chunk in plan.chunks if "layer" in chunk.coords}, rows=plan.rows
    )


def main() -> None:
    mine = costs()
    plan = piper.compile(job, strategy, costs=mine).plan  # they also weigh layers and decide ties
    found = piper.simulate(plan, "h100x8", costs=mine)
    print(
        f"a step takes {found.step_s * 1e3:.1f} ms, of which {found.global_bubble_s * 1e3:.1f} ms are bubble"
    )
    piper.save_costs(Path("own_costs.json"), mine)


if __name__ == "__main__":
    main()
