"""`piper verify` of models that compute in float32 or less inside: another tolerance, with the line that asks for
it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.captures import capturing
from piper.api.reference.reference import reference
from piper.api.reference.reference_differences import FLOAT32
from piper.api.reference.tolerance import BY_DTYPE, tolerances
from piper.api.reference.verification import compared, verify_strategy
from tests.helpers.parity import outcome_of

WIDTH = 16


class Norm(nn.Module):
    """RMS norm in `dtype`, as in Gemma."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.dtype = nn.Parameter(torch.ones(WIDTH)), dtype

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.dtype)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return (y * self.weight.to(self.dtype)).to(x.dtype)


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(Norm(dtype), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 3, WIDTH, generator=generator)[rows.start : rows.stop]
    return x, torch.randint(0, 5, (8, 3), generator=generator)[rows.start : rows.stop]


def entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def float_entropy(output: Tensor, target: Tensor) -> Tensor:
    return entropy(output.float(), target)  # as in Hugging Face's own losses


def job(dtype: torch.dtype, loss: Any = entropy) -> piper.Job:
    def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named], lr=1e-2)

    return piper.Job(
        lambda: Net(dtype),
        batch,
        loss,
        adamw,
        global_batch=8,
        precision=piper.Precision(params="float64"),
    )


PIPELINE = piper.Strategy(piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=2))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_narrow_norm_has_the_tolerance_of_its_dtype_and_names_its_line(dtype: str) -> None:
    trained = job(getattr(torch, dtype), float_entropy)
    *_, wide = tolerances(capturing.captured_job(trained))
    line = Norm.forward.__code__.co_firstlineno + 1
    assert (
        wide.value == BY_DTYPE[dtype]
        and f"test_tolerance.py:{line} (y = x.to(self.dtype)) computes in {dtype}" in wide.why
    )
    report = verify_strategy(trained, PIPELINE)
    assert report.equal, report.text()


@pytest.mark.long
def test_a_loss_in_float32_is_named() -> None:
    report = verify_strategy(job(torch.float64, float_entropy), PIPELINE)
    line = float_entropy.__code__.co_firstlineno + 1
    assert report.equal and report.tolerance.value == FLOAT32, report.text()
    assert (
        "relative tolerance 2e-05 (/" in report.text()
        and f"test_tolerance.py:{line} " in report.text()
    )
    assert "computes in float32" in report.text()


@pytest.mark.long
def test_without_anything_narrow_the_tolerance_is_that_of_float64() -> None:
    report = verify_strategy(job(torch.float64), PIPELINE)
    assert report.equal and report.text().splitlines()[0].endswith("relative tolerance 1e-09")


def test_negative_control_what_is_wrong_is_found_within_the_wider_tolerance() -> None:
    """Gradients that are too large by a ten-thousandth."""
    trained = job(torch.float64, float_entropy)
    expected = reference(trained, microbatches=2, steps=2)
    wrong = outcome_of(expected)
    for gradients in wrong.gradients[0]:
        for gradient in gradients.values():
            gradient.mul_(1 + 1e-4)
    found, tolerance = compared(
        wrong, reference(trained, microbatches=2, steps=2), capturing.captured_job(trained)
    )
    assert len(found) == 2 * len(wrong.gradients[0][0]) and tolerance.value == FLOAT32
