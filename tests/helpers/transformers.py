"""Transformers with dropout in every kind of container, auxiliary gradients, a mixture, and any loss of losses.py.

A few of them have names (`NAMED`); `drawn` makes any other one from a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper_capture import region
from piper_ops import grouped_mm, route, unroute
from tests.helpers import losses
from tests.parity.test_auxiliary_gradients import mean_square, sum_of_squares

VOCABULARY, TOKENS, WIDTH, HEADS, LAYERS, EXPERTS, ROWS = 7, 4, 8, 2, 4, 4, 8
CONTAINERS = ("list", "sequential", "dict", "function")
"""Where dropout stands: in a module of a list, of nn.Sequential or of nn.ModuleDict, or in a call of F.dropout."""
AUXILIARY: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda z: z,
    "mean": mean_square,
    "sum": sum_of_squares,
}


@dataclass(frozen=True)
class Recipe:
    """Say what a model has: `dropout` in `container`, an `auxiliary` gradient, a `mixture`, its `own_loss`."""

    container: str = "list"
    dropout: float = 0.0
    auxiliary: str = ""
    mixture: bool = False
    own_loss: bool = False


class Mixture(nn.Module):
    """Send each token to two of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.down = (
            nn.Parameter(0.3 * torch.randn(EXPERTS, WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        share, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        with region(experts=0):
            rows, counts = route(tokens, chosen, EXPERTS)
            made = unroute(
                grouped_mm(F.silu(grouped_mm(rows, counts, self.up)), counts, self.down),
                chosen,
                share,
            )
        return made.view_as(x)


class Attention(nn.Module):
    def __init__(self, of: Recipe) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop = nn.ModuleList([nn.Dropout(of.dropout)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            part(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.drop[0](self.out(seen))


class Layer(nn.Module):
    def __init__(self, of: Recipe, number: int) -> None:
        super().__init__()
        self.of, self.auxiliary = of, AUXILIARY[of.auxiliary if number == 1 else ""]
        if number == 0:
            self.work: nn.Module = Attention(of)
        elif of.mixture and number == 2:
            self.work = Mixture()
        elif of.container == "dict":
            drop = nn.Dropout(of.dropout)
            self.work = nn.ModuleDict(
                {"up": nn.Linear(WIDTH, WIDTH), "drop": drop, "down": nn.Linear(WIDTH, WIDTH)}
            )
        else:
            drop = nn.Dropout(0.0 if of.container == "function" else of.dropout)
            self.work = nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.GELU(), drop, nn.Linear(WIDTH, WIDTH)
            )

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.work, nn.ModuleDict):
            made = self.work["down"](self.work["drop"](F.gelu(self.work["up"](x))))
        else:
            made = self.work(x)
        if self.of.container == "function" and self.of.dropout:
            made = F.dropout(made, self.of.dropout, self.training)
        return self.auxiliary(x + made)


class Transformer(nn.Module):
    def __init__(self, of: Recipe) -> None:
        super().__init__()
        self.of = of
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layers = [Layer(of, k) for k in range(LAYERS)]
        self.layers = (
            nn.Sequential(*layers) if of.container == "sequential" else nn.ModuleList(layers)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embedding(tokens)
        if isinstance(self.layers, nn.Sequential):
            x = self.layers(x)
        else:
            for layer in self.layers:
                x = layer(x)
        scores = self.head(x)
        if labels is None:
            return scores
        return {
            "loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten())
            + 1e-2 * scores.pow(2).mean(),
            "scores": scores,
        }


def batch(step: int, rows: range) -> tuple[Tensor, dict[str, Tensor]]:
    """Return tokens and targets as `losses.batch` does; some rows, the first or the last in turn, have no label."""
    tokens, t = losses.batch(step, range(ROWS))
    empty = torch.randint(1, ROWS // 2 + 1, (), generator=torch.Generator().manual_seed(step))
    number = torch.arange(ROWS)[:, None]
    without = number < empty if step % 2 else number >= ROWS - empty
    mask = t["mask"] & ~without
    t |= {"mask": mask, "y": torch.where(mask, t["all"], -100), "length": mask.sum(1)}
    return tokens[rows.start : rows.stop], {
        name: part[rows.start : rows.stop] for name, part in t.items()
    }


def labelled(step: int, rows: range) -> dict[str, Tensor]:
    tokens, t = batch(step, rows)
    return {"tokens": tokens, "labels": t["y"]}


LOSSES = (
    "cross_entropy with ignore_index",
    "cross_entropy of shifted labels",
    "cross_entropy with class weights",
    "the same with label smoothing",
    "(sum, weight)",
    "(loss * mask).sum() / mask.sum().clamp(min=1)",
    "a list of pairs",
    "a dict of pairs",
    "cross_entropy plus a mean over all",
    "several cross_entropies with their own targets",
    'cross_entropy, reduction="sum", / 64',
    "mean over each row's own tokens, then over rows",
)

NAMED: dict[str, tuple[Recipe, str]] = {
    "sequential": (Recipe("sequential", 0.2), "cross_entropy with ignore_index"),
    "dict": (Recipe("dict", 0.5, "mean"), "(loss * mask).sum() / mask.sum().clamp(min=1)"),
    "pairs": (Recipe("list", 0.1), "a list of pairs"),
    "mixture": (Recipe(mixture=True), "cross_entropy with class weights"),
    "own_loss": (Recipe("function", 0.3, own_loss=True), ""),
}
"""The models and losses of `make test`."""


def drawn(seed: int) -> tuple[Recipe, str]:
    """Return one of some hundred models and losses."""
    rng = Random(seed)
    mixture = rng.random() < 0.25
    dropout = 0.0 if mixture else rng.choice((0.0, 0.1, 0.5))
    of = Recipe(
        rng.choice(CONTAINERS),
        dropout,
        rng.choice(("", "", "mean", "sum")),
        mixture,
        rng.random() < 0.1,
    )
    return of, "" if of.own_loss else rng.choice(LOSSES)
