"""A captured path may ask for the number of rows: comparisons that change nothing are no reason to refuse a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper_capture import capture
from piper_capture.chunks import other_rows
from piper_capture.chunks.stateful_forward import Transcript
from piper_ir.ground.errors import CaptureError

MOST = 128
Step = Callable[[nn.Linear, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(4, 4), step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.linear, x)


def batch(rows: range) -> tuple[Tensor, Tensor]:
    x = torch.ones(len(rows), 4)
    return x, x


def few(linear: nn.Linear, x: Tensor) -> Tensor:
    if len(x) < 4 or len(x) > 100:
        return torch.tanh(linear(x))
    return linear(x).tanh() if len(x) == 0 else torch.tanh(linear(x))  # type: ignore[no-any-return]  # modules have no types


def other(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x) if x.shape[0] > 3 else linear(x) * x.shape[0]


def test_a_comparison_that_changes_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(lambda: Model(few), batch, F.mse_loss, most=MOST)
    for rows in (1, 2, 6, MOST):
        captured.bind(rows)
    monkeypatch.setattr(
        other_rows, "transcript", lambda forward, kept: Transcript([str(id(forward))])
    )  # no two are equal
    with pytest.raises(CaptureError, match="behaves differently with 2 rows"):
        capture(lambda: Model(few), batch, F.mse_loss, most=MOST)


def test_one_that_does_is_refused_with_its_line_and_a_way_out() -> None:
    line = other.__code__.co_firstlineno + 1
    said = rf"/test_capture_rows.py:{line} \(return linear.*behaves differently with 2 rows.*where rows > 3\..*custom_op"
    with pytest.raises(CaptureError, match=said):
        capture(lambda: Model(other), batch, F.mse_loss, most=MOST)


def test_sizes_up_to_a_number_of_rows_are_refused_at_fewer() -> None:
    best = Model(lambda linear, x: linear(x).topk(min(3, len(x)), 0).values.sum() * x)
    captured = capture(lambda: best, batch, F.mse_loss, whole_batch=False)
    for code in captured.code:
        captured.code.get(code, 5)
    with pytest.raises(
        CaptureError,
        match=r"at 2 rows; .*k of topk or a slice x\[:k\].*Take microbatches of more rows",
    ):
        for code in captured.code:
            captured.code.get(code, 2)
