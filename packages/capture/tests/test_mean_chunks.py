"""Means over tokens that devices share: sums of the devices' terms, divided by the number of all that the mean is
over."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from packages.capture.tests.joint_harness import Case
from packages.capture.tests.lockstep import judge
from piper_capture.layouts import Agreed, choice, means
from piper_ops import cross_entropy
from tests.helpers.cases import each_case

ROWS, TOKENS, WIDTH, CLASSES, IGNORED, EXACT = 2, 8, 6, 5, 3, 1e-12
WHOLE = Agreed(whole=frozenset({1}))
"""The weight is not shared, so that only tokens are."""
Loss = Callable[[Tensor, Tensor], Tensor]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(dtype)


@cache
def case(loss: Loss, dtype: torch.dtype = torch.float64) -> Case:
    """A product and a loss of features, as the last chunk of a model."""

    def function(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return loss(x @ weight, target)

    given = (
        drawn(ROWS, TOKENS, WIDTH, dtype=dtype),
        drawn(WIDTH, WIDTH, dtype=dtype),
        drawn(ROWS, TOKENS, WIDTH, seed=1, dtype=dtype),
    )
    return Case(function, ("value", "param", "batch"), given)


@cache
def classes() -> Case:
    """An output head and a loss, of whose targets those of the first tokens do not count."""
    target = torch.randint(CLASSES, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    target[:, :3] = IGNORED

    def function(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy((x @ weight).flatten(0, 1), target.flatten(), ignore_index=IGNORED)

    given = drawn(ROWS, TOKENS, WIDTH), drawn(WIDTH, CLASSES), target
    return Case(function, ("value", "param", "batch"), given, portable=True)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def by_feature(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean((0, 1)).cos().sum()


LOSSES: tuple[Loss, ...] = (squared, by_feature, F.mse_loss, F.smooth_l1_loss, F.huber_loss)


@each_case("degree", [2, 4])
@each_case("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_mean_is_a_sum_of_terms(loss: Loss, degree: int) -> None:
    found = judge(case(loss), degree, stream=True, agreed=WHOLE)
    assert found.error < EXACT
    assert found.forward == {"all_reduce": 1} and not found.backward["all_gather"], (
        "a sum, and no tokens"
    )


@pytest.mark.parametrize("degree", [2, 4])
def test_classes_that_are_not_shared(degree: int) -> None:
    found = judge(classes(), degree, stream=True)
    assert found.error < EXACT
    assert found.forward == {"all_reduce": 1} and not found.backward, "the loss, and no logits"


def test_without_a_stream_a_mean_stays_one() -> None:
    targets = {str(n.target) for n in judge(classes(), 2).shared.joint.graph.nodes}
    assert not any("ne.Scalar" in t for t in targets)


def test_a_sum_in_half_precision_could_be_too_large() -> None:
    found = judge(case(squared, torch.bfloat16), 2, stream=True, agreed=WHOLE)
    assert found.forward == {"all_gather": 1}


def mean_of_means(logits: Tensor, target: Tensor, *rest: Any) -> Any:
    """Returns, of two devices that each take the mean over their own targets, the term that makes the mean of both."""
    _, lse = cross_entropy(logits, target, "sum", IGNORED)
    counted = classes().tensors[2] != IGNORED
    return cross_entropy(logits, target, "mean", IGNORED)[0] * counted.sum() / 2, lse


def test_a_mean_over_local_tokens_is_seen() -> None:
    instead = {torch.ops.piper.cross_entropy.default: mean_of_means}
    assert judge(classes(), 2, stream=True, instead=instead).error > 1e-3


@pytest.mark.parametrize("fault", ["count", "gathered"])
def test_what_the_judge_sees(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "count":
        monkeypatch.setattr(means, "IGNORED", -7)
        monkeypatch.setattr(means, "_divided", lambda emit, source, count: source)
        assert judge(classes(), 2, stream=True).error > 1e-3
    else:
        monkeypatch.setattr(choice, "means_apart", lambda joint, shared: joint)
        assert judge(classes(), 2, stream=True).forward["all_gather"] > 0
