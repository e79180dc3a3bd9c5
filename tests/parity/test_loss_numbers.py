"""Protect that numbers beside a loss are those of the whole batch: what it divides by in half precision, and
metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from tests.helpers import losses

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
    (by_class_weights, LOG, 1e-6), pytest.param(beside_penalty, CLASSES + 2.0, 1e-3, marks=pytest.mark.long),
    *(pytest.param(loss, LOG, 1e-6, marks=pytest.mark.long) for loss in (by_count, by_rounded_count, by_multiple, by_clamped)),
])  # fmt: skip
def test_a_count_is_exact_beyond_256(loss: Any, right: float, close: float) -> None:
    job = piper.Job(
        Undecided, batch, loss, lambda named: torch.optim.SGD([p for _, p in named], 0.1), global_batch=ROWS,
        precision=piper.Precision("float32", compute="bfloat16"),
    )  # fmt: skip
    compiled = piper.compile(
        job, piper.Strategy(piper.Mesh(), [piper.split(piper.where(), microbatches=4)])
    )
    run = piper.execute(compiled, steps=1, launcher="inline", memory=False)
    assert run.losses[0] == pytest.approx(right, rel=close)


def right(output: Tensor, t: Any) -> Tensor:
    return (output.argmax(-1) == t["all"]) & t["mask"]


METRICS: dict[str, Any] = {
    "accuracy": lambda o, t: right(o, t).sum() / t["mask"].sum(),
    "loss_of_labels": lambda o, t: losses.ce(o, t["y"]),
    "hits": lambda o, t: right(o, t).sum(),
    "labels": lambda o, t: t["mask"].sum(),
    "per_row": lambda o, t: right(o, t).double().mean(),
    "precision": lambda o, t: right(o, t).sum() / (o.argmax(-1) < 3).sum(),
    "pair": lambda o, t: (right(o, t).sum(), t["mask"].sum()),
}
COUNTS = {"hits", "labels"}


@pytest.mark.long
def test_metrics_are_those_of_the_whole_batch() -> None:
    """Labels are unevenly masked, so that means of microbatches differ; sums are added up."""
    job = piper.Job(
        losses.Tagger, losses.batch, losses.LOSSES["mse_loss"][1], lambda named: torch.optim.SGD([p for _, p in named], 0.0),
        global_batch=losses.ROWS, precision=piper.Precision("float64"), metrics=METRICS, eval_data=losses.batch, eval_every=1,
        eval_batches=2,
    )  # fmt: skip
    strategy = piper.Strategy(
        piper.Mesh(pp=2, dp=2),
        (*piper.recipes.gpipe(pp=2, microbatches=2), *piper.recipes.data_parallel()),
    )
    run = piper.execute(piper.compile(job, strategy), steps=1, launcher="inline", memory=False)
    model = losses.Tagger().double()
    model.load_state_dict(run.state_dict())
    batches = [losses.batch(k, range(losses.ROWS)) for k in range(2)]
    for name, metric in METRICS.items():
        with torch.no_grad():
            found = [metric(model(x), t) for x, t in batches]
        first, second = (float(v[0] / v[1]) if isinstance(v, tuple) else float(v) for v in found)
        assert run.metrics[0][name] == pytest.approx(first, rel=1e-6), (
            name
        )  # torch's own mean is one in float32
        if name in COUNTS:
            assert run.evaluations[0][name] == first + second
