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
    def forward(ctx: Any, scores: Tensor, classes: Tensor, how: str) -> Tensor:
        kept = (classes != -100).to(scores.dtype)
        share = (
            kept if how == "sum" else kept / kept.sum() if how == "kept" else kept / kept.numel()
        )
        ctx.save_for_backward(scores, classes, share)
        return (F.cross_entropy(scores, classes, reduction="none") * share).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]  # torch has any arguments
        scores, classes, share = ctx.saved_tensors
        hot = F.one_hot(classes.clamp(min=0), scores.shape[-1]).to(scores.dtype)
        return grad * (scores.softmax(-1) - hot) * share[:, None], None, None


def own(how: str, labels: str = "y") -> Any:
    return lambda o, t: OwnEntropy.apply(o.flatten(0, 1), t[labels].flatten(), how) * 1.0


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("how", "kind"), [("sum", "total"), ("all", "mean")])
@pytest.mark.parametrize("way", ["pp", "dp"])
def test_a_function_of_a_user_is_tried_on_numbers(how: str, kind: str, way: str) -> None:
    assert check(job(own(how)), way) == kind


def test_a_function_of_a_user_that_divides_by_a_count_is_refused() -> None:
    """A part of a batch may not give one number, since every function would seem to be a mean then."""
    with pytest.raises(
        CaptureError, match=r"test_own_losses.py:\d+.*neither a sum nor a mean over rows"
    ):
        check(job(own("kept")), "pp")


def by_nan(o: Tensor, t: Any) -> Tensor:
    return torch.where(t["y"] != -100, losses.each(o, t["all"]), torch.nan).nanmean()


def from_zero(o: Tensor, t: Any) -> Tensor:
    return torch.where(t["y"] >= 0, losses.each(o, t["all"]), torch.nan).nanmean()


@pytest.mark.parametrize("loss", [by_nan, from_zero])
def test_numbers_that_a_loss_compares_with_are_among_those_tried(loss: Any) -> None:
    """The mean over some integers is one over all where none of them is -100."""
    with pytest.raises(CaptureError, match=r"test_own_losses.py:\d+"):
        check(job(loss), "pp")
