"""A parameter that one stage trains and another only reads, where ranks share its gradients or itself."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import Mesh, Strategy, recipes
from piper.api.reference.reference import reference
from piper.api.reference.reference_differences import RunOutcome, differences


class Read(nn.Module):
    """Layers, and the first one's weight again behind the last, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x + nn.functional.linear(x, self.layers[0].weight.detach())


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))[rows.start : rows.stop]
    return x, x.roll(1, 1)


@functools.cache
def job() -> piper.Job:
    return piper.Job(
        Read,
        batch,
        nn.functional.mse_loss,
        lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01),
        global_batch=8,
        precision="float64",
        clip_norm=0.1,
    )


@pytest.mark.parametrize("reduced", [0, "step"])
def test_a_stage_that_only_reads_a_parameter_folds_no_gradient(reduced: float | str) -> None:
    for zero in (2, 3):
        shared = recipes.data_parallel(zero=zero, bucket_mb=0.0005, reduced_mb=reduced)
        made = piper.compile(
            job(), Strategy(Mesh(pp=2, dp=2), (*recipes.one_f_one_b(pp=2, microbatches=2), *shared))
        )
        run = piper.execute(made, steps=3, launcher="inline", gradients=True)
        expected = reference(job(), replicas=2, microbatches=2, steps=3)
        assert not differences(RunOutcome.of(run), expected)
        assert run.peak_bytes == {r: made.plan.role_of(r).peak_bytes for r in range(4)}
