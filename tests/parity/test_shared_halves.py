"""Tokens that a model views as several dimensions: halves that are averaged, and read again in another order."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import Mesh
from piper_compiler import Strategy
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.select import where
from piper_runtime.rank.job.job import Job
from tests.helpers import models, parity, shared_jobs
from tests.helpers.compositions import Composition, job_of


class Mean(nn.Module):
    """Averages equal parts of the tokens."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.inner, self.parts = nn.Linear(models.D, models.D), parts

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        return self.inner(placed(x)).view(rows, self.parts, length // self.parts, width).mean(1)


class Twice(nn.Module):
    """Puts what it computes of tokens behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(models.D, models.D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.inner(placed(x))], 1)


def placed(x: Tensor) -> Tensor:
    """Values that tell the places of tokens."""
    return torch.tanh(x * torch.sin(torch.arange(x.shape[1], dtype=x.dtype) + 1)[:, None])


class Halves(nn.Module):
    """Views tokens as [parts, rest] in its layers."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.embed, self.length = nn.Embedding(models.VOCAB, models.D), models.T // parts * parts
        self.layers = nn.ModuleList([Mean(parts), Twice()])
        self.head = nn.Linear(models.D, models.VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, : self.length])
        for layer in self.layers:
            x = layer(x)
        return self.head(placed(x)).mean(1)


class Tables(nn.Module):
    """Adds a table of positions, made by a product, in two views: each is a sum over devices that settles by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(models.VOCAB, models.D),
            nn.Linear(models.D, models.VOCAB),
        )
        self.up, self.down = (
            nn.Parameter(torch.randn(*shape)) for shape in ((models.T, 8), (8, models.D))
        )

    def forward(self, tokens: Tensor) -> Tensor:
        table = torch.tanh(self.up) @ self.down
        halves, quarters = table.view(models.T, 2, -1).tanh(), table.view(models.T, 4, -1).relu()
        return self.head(
            self.embed(tokens) + halves.reshape(table.shape) * quarters.reshape(table.shape)
        ).mean(1)


def last_token(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets[:, -1])


@functools.cache
def job(parts: int) -> Job:
    return replace(
        job_of(Composition("gpt_untied")),
        model=functools.partial(Halves, parts),
        loss=last_token,
        global_batch=4,
    )


def test_what_a_sum_leaves_undefined_is_read_by_nobody() -> None:
    """Two sums of one tensor: the first would spoil what the second adds up."""
    tables = replace(job(2), model=Tables)
    made = piper.compile(tables, Strategy(Mesh(tp=2), [piper.shard(where(), stream="tokens")]))
    steps = [step for chunk in made.plan.chunks for step in chunk.steps.values()]
    assert max(sum(c.kind == "reduce_scatter" for c in step.collectives) for step in steps) >= 2
    parity.assert_parity(shared_jobs.run(made), parity.reference(tables))


CONTEXT: dict[str, Any] = {"over": "cp", "index": "tokens"}


def compiled(parts: int, sizes: dict[str, int], **how: Any) -> Any:
    return piper.compile(job(parts), Strategy(Mesh(**sizes), [piper.shard(where(), **how)]))


def test_parts_of_one_dimension_are_exchanged_for_each_other() -> None:
    """A device has a part of each half, and wants one half whole: both are in the dimension of the tokens."""
    made = compiled(2, {"cp": 2}, **CONTEXT)
    assert any(
        c.kind == "all_to_all"
        for chunk in made.plan.chunks
        for step in chunk.steps.values()
        for c in step.collectives
    )
    parity.assert_parity(shared_jobs.run(made), parity.reference(job(2)))


def test_dimensions_within_each_other_are_refused() -> None:
    """Of 2 x 4 tokens four devices share both; of the 4 that are left they would share the second once more."""
    with pytest.raises(
        DirectiveError,
        match="share dimensions of 2 x 4 and of 4 elements, one of which is within the other",
    ):
        compiled(2, {"cp": 4}, **CONTEXT)


def test_a_view_that_devices_cannot_share_is_said() -> None:
    with pytest.raises(
        DirectiveError,
        match=r"6 tokens, .* views as 3 x 2, cannot be shared by 2 devices \(cp=2\); 3 can",
    ):
        compiled(3, {"cp": 2}, **CONTEXT)
