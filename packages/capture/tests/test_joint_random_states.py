"""AOTAutograd makes no random states, which nothing would read; it traces what changes a tensor in place."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch._decomp import decompositions_for_rng

from piper_capture import capture
from piper_capture.torch_api import _torch_joint


def batch(rows: range) -> tuple[Tensor, Tensor]:
    return torch.ones(len(rows), 4), torch.ones(len(rows), 4)


def changing() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout())


def test_a_trace_makes_no_random_states(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Mock(wraps=decompositions_for_rng.PhiloxState)
    monkeypatch.setattr(decompositions_for_rng, "PhiloxState", made)
    capture(changing(), batch, nn.functional.mse_loss)
    assert not made.called
    monkeypatch.setattr(_torch_joint, "_without_random_states", nullcontext)
    capture(changing(), batch, nn.functional.mse_loss)
    assert made.called, "torch makes none any more: the context can go"
