"""Inverses and factors of matrices, whose search for singular ones is an effect that no step has room for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from piper_capture import capture
from piper_capture.torch_api import _torch_joint
from piper_ir.ground.errors import CaptureError

WIDTH = 4


class Whitened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        square = self.weight.mT @ self.weight + torch.eye(WIDTH)
        return (
            x @ torch.linalg.inv(square)
            + torch.linalg.solve(torch.linalg.cholesky(square), x.mT).mT @ square.inverse()
        )


def batch(rows: range) -> tuple[Tensor, Tensor]:
    return torch.ones(len(rows), WIDTH), torch.ones(len(rows), WIDTH)


def test_they_are_captured_without_their_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(Whitened, batch, nn.functional.mse_loss)
    assert [chunk.id for chunk in captured.program.chunks] == ["root"]

    @contextmanager
    def checked() -> Iterator[None]:
        yield

    monkeypatch.setattr(_torch_joint, "_matrices_unchecked", checked)
    with pytest.raises(CaptureError, match="with_effects"):
        capture(Whitened, batch, nn.functional.mse_loss)
