"""Losses that hold tensors: weights of classes in a module, in a closure, in a global."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.verification import verify_strategy
from piper_ir.errors import CaptureError

WIDTH, CLASSES = 8, 3
WEIGHTS = torch.tensor([1.0, 2.0, 0.5])


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor = nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1), torch.tensor(2.0)

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return self.inner(scores, target) * self.factor


def in_closure() -> Callable[[Tensor, Tensor], Tensor]:
    weights = WEIGHTS * 2

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(scores, F.one_hot(target, CLASSES).to(scores), pos_weight=weights.to(scores))

    return loss


def of_global(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores, target, WEIGHTS.to(scores))


def changed(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores, target, WEIGHTS[:].mul_(1.1).to(scores))


def uncast(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.double(), target, WEIGHTS)


class Centers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(scores, self.centers[target])


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))[rows.start : rows.stop]
    return x, (x[:, 0] * 10).long() % CLASSES


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


TWO = piper.Strategy(piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=2))


def job(loss: Any) -> piper.Job:
    return piper.Job(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)), batch, loss, sgd, global_batch=8)


def gaussian(scores: Tensor, target: Tensor) -> Tensor:
    """torch's function looks for negative variances, which no graph can."""
    wide, wanted = F.softplus(scores), F.one_hot(target, CLASSES).to(scores)
    return F.gaussian_nll_loss(scores, wanted, wide, full=True) + nn.GaussianNLLLoss(reduction="sum")(scores, wanted, wide[:, 0])


LOSSES = {"module": Weighted(), "closure": in_closure(), "global": of_global, "gaussian": gaussian}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_equal_one_device(loss: Any) -> None:
    report = verify_strategy(job(loss), TWO, steps=2)
    assert report.equal, report.text()


def test_other_weights_are_another_capture() -> None:
    def losses(weights: Tensor) -> list[float]:
        compiled = piper.compile(job(nn.CrossEntropyLoss(weights)), TWO)
        return piper.execute(compiled, steps=1, launcher="inline").losses

    assert losses(WEIGHTS) != losses(WEIGHTS.flip(0))


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (changed, "changes a tensor of its own, of shape .3,., in place.*clone"),
        (uncast, r"class weights of torch.float32 beside logits of torch.float64.*weight.to\(logits.dtype\)"),
        (Centers(), "a parameter 'centers', which is trained.*Let the model hold it"),
    ],
    ids=["changed", "uncast", "trained"],
)
def test_what_cannot_be_a_constant_is_refused(loss: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        piper.compile(job(loss), TWO)
