"""Models whose tensors share storage, but not in a way that training could notice, equal one device."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import Tensor, nn

import piper
from packages.capture.tests.test_capture_shared import ACCEPTED, Net
from piper.api.reference.verification import verify_strategy
from piper_ir.ground.errors import JobError


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 32).view(8, 4)[rows.start : rows.stop] + step
    return x, -x


@pytest.mark.sampled(3)
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


class Arrays(nn.Module):
    """A parameter and a buffer on the memory of one numpy array: two storages of torch's on the same bytes."""

    def __init__(self) -> None:
        super().__init__()
        array = numpy.ones((8, 8), dtype=numpy.float32)
        self.weight = nn.Parameter(torch.from_numpy(array))
        self.register_buffer("copy", torch.from_numpy(array))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + x @ self.copy


def test_one_array_under_two_tensors_is_refused_before_a_run() -> None:
    def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
        return torch.ones(len(rows), 8), torch.ones(len(rows), 8)

    job = piper.Job(
        Arrays,
        batch,
        nn.functional.mse_loss,
        lambda named: torch.optim.SGD([p for _, p in named], 0.1),
        global_batch=2,
    )
    compiled = piper.compile(job, piper.Strategy(piper.Mesh(), ()))
    with pytest.raises(JobError, match="'copy' and 'weight' of the same memory"):
        piper.execute(compiled, steps=1, launcher="inline")
