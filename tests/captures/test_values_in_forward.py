"""Forwards that depend on values: the line that makes a size, and the smallest part that can run as it was written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.api.reference.verification import verify_strategy
from piper_ir.ground.errors import CaptureError, DirectiveError
from tests.helpers.capture_jobs import ONE, WIDTH, job, sgd


class Counts(nn.Module):
    """Say which rows go to which of two experts, the numbers of rows as Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, list[int]]:
        chosen = self.gate(x).argmax(-1)
        return chosen.argsort(stable=True), chosen.bincount(minlength=2).tolist()


class Routed(nn.Module):
    """Send each row to one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = (
            Counts(),
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        order, counts = self.router(x)
        parts = [
            expert(part) for expert, part in zip(self.experts, x[order].split(counts), strict=True)
        ]
        return x + torch.zeros_like(x).index_copy(0, order, torch.cat(parts))


class Stacked(nn.Module):
    """Have several such layers, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), Routed()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::piper_ir.ground.errors.PiperWarning")
def test_the_part_around_one_that_returns_numbers_runs_as_it_was_written() -> None:
    notes = piper.compile(job(Stacked), ONE).notes
    assert [note for note in notes if "'layers.0.1' (Routed) and 2 more" in note], notes
    report = verify_strategy(job(Stacked), ONE, steps=2)
    assert report.equal, report.text()


class Pooled(nn.Module):
    """Add up the nodes of each graph of a batch, as many as the largest number says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        graphs = int(graph.max()) + 1
        return torch.zeros(graphs, WIDTH).index_add(0, graph, self.linear(x))


def test_a_size_that_forward_makes_is_said_with_its_line() -> None:
    def batch(step: int, rows: range) -> tuple[tuple[Tensor, Tensor], Tensor]:
        return (torch.ones(len(rows), WIDTH), torch.arange(len(rows))), torch.ones(len(rows), WIDTH)

    pooled = piper.Job(Pooled, batch, nn.functional.mse_loss, sgd, global_batch=8)
    with pytest.raises(
        CaptureError,
        match=r"graphs = int\(graph.max\(\)\) \+ 1.*depends on values(?!.*stands in the loss)",
    ):
        piper.compile(pooled, ONE)


class Spare(nn.Module):
    """Have a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.spare.sum(0)


def test_a_parameter_without_elements_stays_whole_where_devices_share_others() -> None:
    shared = piper.Strategy(
        piper.Mesh(tp=2), [piper.shard(piper.where(), over="tp"), *ONE.directives]
    )
    assert verify_strategy(job(Spare), shared, steps=1).equal


class ReadAlone(nn.Module):
    """Read the parameters of layers, and call none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.linear(x, layer.weight, layer.bias)
        return x


def test_layers_that_are_read_alone_are_said_not_to_be_called() -> None:
    with pytest.raises(
        DirectiveError,
        match=r"entries of an nn.ModuleList that forward calls.*only reads parameters",
    ):
        piper.compile(
            job(ReadAlone),
            piper.Strategy(piper.Mesh(pp=2), piper.recipes.pipeline(pp=2, microbatches=2)),
        )
