"""Protect that a loss which cannot be seen into trains the whole batch, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from piper_ir.ground.errors import CaptureError
from tests.helpers import losses
from tests.parity.test_losses import check, job


class OwnEntropy(torch.autograd.Function):
    """Compute a cross-entropy with a backward of its own, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, classes: Tensor, how: str, ignored: int = -100) -> Tensor:
        kept = (classes != ignored).to(scores.dtype)
        share = (
            kept if how == "sum" else kept / kept.sum() if how == "kept" else kept / kept.numel()
        )
        ctx.save_for_backward(scores, classes, share)
        each = F.cross_entropy(scores, classes.clamp(0, scores.shape[-1] - 1), reduction="none")
        return (each * share).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]  # torch has any arguments
        scores, classes, share = ctx.saved_tensors
        hot = F.one_hot(classes.clamp(min=0), scores.shape[-1]).to(scores.dtype)
        return grad * (scores.softmax(-1) - hot) * share[:, None], None, None, None


def own(how: str, labels: str = "y", ignored: int = -100) -> Any:
    return lambda o, t: OwnEntropy.apply(o.flatten(0, 1), t[labels].flatten(), how, ignored) * 1.0


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("how", "kind"), [("sum", "total"), ("all", "mean")])
@pytest.mark.parametrize("way", ["pp", "dp"])
def test_a_function_of_a_user_is_tried_on_numbers(how: str, kind: str, way: str) -> None:
    assert check(job(own(how)), way) == kind


@pytest.mark.parametrize("loss", [own("kept"), own("kept", "all", 6)])
def test_a_function_of_a_user_that_divides_by_a_count_is_refused(loss: Any) -> None:
    """A part of a batch may not give one number, since every function would seem to be a mean then.

    Random targets have 6, which the function compares with, only if the trial looks into it.
    """
    with pytest.raises(
        CaptureError, match=r"test_own_losses.py:\d+.*neither a sum nor a mean over rows"
    ):
        check(job(loss), "pp")


class OwnSquares(torch.autograd.Function):
    """Compute the mean square over the numbers that are not missing."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, wanted: Tensor) -> Tensor:
        there = ~wanted.isnan()
        missed = torch.where(there, output - wanted.nan_to_num(), 0.0)
        ctx.save_for_backward(missed, there.sum())
        return missed.square().sum() / there.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # torch has any arguments
        missed, count = ctx.saved_tensors
        return grad * 2 * missed / count, None


def test_a_function_of_a_user_that_leaves_out_missing_numbers_is_refused() -> None:
    with pytest.raises(CaptureError, match="neither a sum nor a mean over rows"):
        check(job(lambda o, t: OwnSquares.apply(o, t["f"]) * 1.0), "pp")


def from_zero(o: Tensor, t: Any) -> Tensor:
    return torch.where(t["y"] >= 0, losses.each(o, t["all"]), torch.nan).nanmean()


def test_a_mean_over_numbers_that_are_not_missing_is_divided_by_their_count() -> None:
    assert check(job(from_zero), "pp") == "sum"
