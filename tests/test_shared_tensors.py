"""Models whose tensors share storage, but not in a way that training could notice, equal one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import piper
from packages.compiler.tests.test_capture_shared import ACCEPTED, Net
from piper.api.verification import verify_strategy


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 32).view(8, 4)[rows.start : rows.stop] + step
    return x, -x


@pytest.mark.parametrize("name", ACCEPTED)
def test_tensors_of_one_storage_equal_one_device(name: str) -> None:
    job = piper.Job(
        lambda: Net(ACCEPTED[name], False),
        batch,
        nn.functional.mse_loss,
        lambda named: torch.optim.AdamW([p for _, p in named]),
        global_batch=8,
    )
    report = verify_strategy(job, piper.Strategy(piper.Mesh(dp=2), piper.recipes.data_parallel()))
    assert report.equal, report.text()
