"""Protect that what a loss divides by is counted exactly, whatever is computed in half precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper

ROWS, TOKENS, CLASSES = 4, 259, 5


class Undecided(nn.Module):
    """Gives every class of every token the same score, so that each has a loss of log(5)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 8)
        self.head = nn.Linear(8, CLASSES, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    numbers = torch.tensor(rows)[:, None] + torch.arange(TOKENS)
    return numbers % 3, numbers % CLASSES


def each(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2).float(), y, reduction="none")


def by_count(scores: Tensor, y: Tensor) -> Tensor:
    mask = (y < 10).to(scores.dtype)
    return (each(scores, y) * mask).sum() / mask.sum()


def by_rounded_count(scores: Tensor, y: Tensor) -> Tensor:
    return each(scores, y).sum() / (y < 10).sum().to(scores.dtype)


def by_multiple(scores: Tensor, y: Tensor) -> Tensor:
    return each(scores, y).sum() * 3 / (3 * (y < 10).to(scores.dtype).sum())


def by_clamped(scores: Tensor, y: Tensor) -> Tensor:
    return each(scores, y).sum() / (y < 10).to(scores.dtype).sum().clamp(min=1)


def beside_penalty(scores: Tensor, y: Tensor) -> Tensor:
    """Add a constant to a mean in half precision: each is multiplied by the count."""
    scores = scores.pow(2) + 1.0
    return scores.sum() / (y < 10).sum().to(scores.dtype) + torch.tensor(2.0, dtype=scores.dtype)


def by_class_weights(scores: Tensor, y: Tensor) -> Tensor:
    weights = torch.ones(CLASSES, dtype=scores.dtype)
    return F.cross_entropy(scores.transpose(1, 2), y, weight=weights)


LOG = math.log(CLASSES)


@pytest.mark.parametrize(("loss", "right", "close"), [
    (by_count, LOG, 1e-6), (by_rounded_count, LOG, 1e-6), (by_multiple, LOG, 1e-6), (by_clamped, LOG, 1e-6),
    (beside_penalty, CLASSES + 2.0, 1e-3), (by_class_weights, LOG, 1e-6),
])  # fmt: skip
def test_a_count_is_exact_beyond_256(loss: Any, right: float, close: float) -> None:
    job = piper.Job(
        Undecided, batch, loss, lambda named: torch.optim.SGD([p for _, p in named], 0.1), global_batch=ROWS,
        precision=piper.Precision("float32", compute="bfloat16"),
    )  # fmt: skip
    compiled = piper.compile(job, piper.Strategy(piper.Mesh(), [piper.split(piper.where(), microbatches=4)]))
    run = piper.execute(compiled, steps=1, launcher="inline", memory=False)
    assert run.losses[0] == pytest.approx(right, rel=close)
