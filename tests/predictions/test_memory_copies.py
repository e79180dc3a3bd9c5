"""Copies that kernels need of tensors which lie in another way are in the plan, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper_capture.values import aliasing
from piper_ir.ground.select import where
from piper_ops import layer_norm_backward
from piper_ops.attention import sdpa
from piper_ops.costing import workspace
from tests.helpers import compositions
from tests.helpers.cases import each_case
from tests.helpers.memory_judge import lies, planned

TOKENS, HEADS, HEAD = 12, 2, 4
ONE: tuple[dict[str, int], tuple[Any, ...]] = ({"dp": 1}, ())
SHARED = (
    {"tp": 2, "cp": 2},
    (piper.shard(where(), stream="tokens"), piper.shard(where(), over="cp", index="tokens")),
)


class Attention(nn.Module):
    """Its query, key and value come out of one projection, which also has the first product of a feed-forward where
    that is unequal; `how` says what is next to each other in memory."""

    def __init__(self, how: str, width: int) -> None:
        super().__init__()
        self.how, self.width = how, width
        self.inputs = nn.Linear(width, 3 * HEADS * HEAD + (16 if how == "unequal" else 0))
        self.out = nn.Linear(HEADS * HEAD, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, made = len(x), self.inputs(x)
        if self.how == "elements":  # of heads: they are apart in memory
            q, k, v = made.view(rows, TOKENS, HEAD, HEADS, 3).permute(4, 0, 3, 1, 2)
        else:
            q, k, v = (
                made[..., : 3 * HEADS * HEAD]
                .view(rows, TOKENS, 3, HEADS, HEAD)
                .permute(2, 0, 3, 1, 4)
            )
        if self.how == "heads":  # have their tokens together, as the kernel's output then has
            q = q.contiguous()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Mixer(nn.Module):
    """Its norm gets the gradient of a transposed tensor."""

    def __init__(self, how: str, width: int) -> None:
        super().__init__()
        self.first, self.norm, self.mix = (
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.Linear(TOKENS, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.norm(self.first(x)).transpose(1, 2)).transpose(1, 2)


class Windows(nn.Module):
    """The gradient of its windows comes from a kernel that makes it in memory as large as all windows."""

    def __init__(self, how: str, width: int) -> None:
        super().__init__()
        self.first, self.mix = nn.Linear(width, width), nn.Linear(9, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = F.unfold(self.first(x).unsqueeze(1), 3, padding=1)
        return x + self.mix(windows.transpose(1, 2)).view(x.shape)


class Bags(nn.Module):
    """Its table makes one place more than a bag has tokens, which a view of the result leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(16, 8, mode="sum")
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(self.table(tokens))))


def measured(
    how: str, width: int, sizes: dict[str, int], directives: tuple[Any, ...]
) -> tuple[list[str], list[int]]:
    """Return what is wrong with the plan of such a model, and at each instruction of each rank the bytes that it is
    short."""

    def batch(step: int, rows: range) -> Any:
        x = torch.randn(len(rows), TOKENS, width, generator=torch.Generator().manual_seed(step))
        return x, x[:, :1] if how == "norm" else x.roll(1, dims=1)

    kind = {"norm": Mixer, "windows": Windows}.get(how, Attention)
    sgd, precision = compositions.OPTIMIZERS["sgd"], piper.Precision(params="float64")
    job = piper.Job(
        lambda: kind(how, width), batch, F.mse_loss, sgd, global_batch=4, precision=precision
    )
    compiled = piper.compile(job, piper.Strategy(piper.Mesh(**sizes), directives))
    plan, records = compiled.plan, dict(piper.execute(compiled, steps=1, launcher="inline").memory)
    short = []
    for rank, record in records.items():
        within = {p.instr: p.within - record.states for p in record.points}
        short += [within[p.instr] - p.fullest for p in planned(plan, plan.role_of(rank))]
    return lies(plan, records), short


@pytest.mark.long
@each_case("how", ["elements", "heads", "norm", "windows"])
def test_what_lies_in_another_way_is_counted_with_its_copy(how: str) -> None:
    found, short = measured(how, 8, *ONE)
    assert not found and set(short) == {0}, (found[:6], short)


@pytest.mark.long
def test_what_devices_gather_for_an_op_that_is_computed_whole() -> None:
    """Queries come out of gathers with all tokens of a head together."""
    found, short = measured("unequal", 8, *SHARED)
    assert not found and set(short) == {0}, (found[:6], short)


def test_places_of_bags_that_devices_share() -> None:
    def batch(step: int, rows: range) -> Any:
        tokens = torch.arange(6 * len(rows)).view(-1, 6) % 16
        return tokens, torch.ones(len(rows), 8)

    sgd, precision = compositions.OPTIMIZERS["sgd"], piper.Precision(params="float64")
    job = piper.Job(Bags, batch, F.mse_loss, sgd, global_batch=4, precision=precision)
    strategy = piper.Strategy(piper.Mesh(tp=2), piper.recipes.tensor_parallel())
    compiled = piper.compile(job, strategy)
    assert compiled.plan.shared
    run = piper.execute(compiled, steps=1, launcher="inline")
    assert not lies(compiled.plan, dict(run.memory))


def test_a_plan_without_the_memory_of_all_windows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliasing, "show_whole_storages", lambda graph: None)
    found, short = measured("windows", 10, *ONE)
    assert found and max(short) >= 1000, short


@pytest.mark.parametrize("how", ["elements", pytest.param("norm", marks=pytest.mark.long)])
def test_a_plan_without_the_copies_is_found(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for op in (sdpa.attention, sdpa.attention_dgrad, layer_norm_backward):
        monkeypatch.delitem(workspace._ON_CPU, op)
    found, short = measured(how, 10, *ONE)  # of another width, so that it is captured anew
    assert found and max(short) >= 1000, short
