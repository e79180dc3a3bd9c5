"""Mixtures in runs: the loss that balances experts is the same under every plan, and so are the tokens that are
logged."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import Mesh, models, recipes
from piper.api.running.metrics import JsonLines, StepMetrics
from piper.models.mixture import ExpertLayer
from piper_ir.ground.errors import JobError
from piper_ir.ground.expert_tokens import counts_tokens, experts_of
from piper_ops import grouped_mm, route, unroute
from piper_report import load
from piper_report.tables.expert_tables import layer_sheet
from piper_runtime.rank.binding.rank_state import RankState
from piper_simulator import simulate
from tests.helpers import parity, steered
from tests.helpers.compositions import adamw

CONFIG = models.MoEConfig(
    layers=2,
    width=16,
    heads=4,
    kv_heads=2,
    hidden=16,
    vocab=32,
    length=8,
    experts=4,
    top_k=2,
    capacity_factor=1.0,
    balance=0.5,
)


def test_it_is_how_often_an_expert_is_chosen_times_its_mean_score() -> None:
    """Expert by expert and row by row; all experts alike give 1, and a row that loves one of them more."""
    assert CONFIG.experts is not None
    experts = ExpertLayer(16, CONFIG.experts).double()
    x = torch.randn(3, 8, 16, dtype=torch.float64)
    scores = experts.scored(x)
    _, chosen = experts.routed(x)
    found = experts.balance(scores, chosen)
    for row in range(3):
        often = [(chosen[row] == e).sum().item() * 4 / (2 * 8) for e in range(4)]
        wanted = sum(f * scores[row, :, e].mean().item() for e, f in enumerate(often))
        assert found[row].item() == pytest.approx(wanted, rel=1e-12)
    even = torch.full((1, 8, 4), 0.25, dtype=torch.float64)
    turns = torch.tensor([[0, 1], [2, 3]] * 4)[None]
    assert experts.balance(even, turns).item() == pytest.approx(1.0)
    one = torch.tensor([[0.7, 0.1, 0.1, 0.1]], dtype=torch.float64).expand(1, 8, 4)
    assert experts.balance(one, one.topk(2).indices).item() > 1.5


def test_there_is_none_by_default() -> None:
    plain, tokens = CONFIG.with_experts(balance=0.0), torch.zeros(2, 8, dtype=torch.int64)
    assert isinstance(plain.build()(tokens), Tensor) and len(CONFIG.build()(tokens)) == 2
    for wrong in (-0.1, float("nan"), float("inf")):
        with pytest.raises(
            JobError, match=r"balance=.*a number from 0 on is needed, such as 0.001"
        ):
            CONFIG.with_experts(balance=wrong)


@cache
def job(balance: float) -> Any:
    made = models.job(CONFIG.with_experts(balance=balance), global_batch=8, precision="float64")
    return replace(made, optimizer=adamw, clip_norm=0.5)


@cache
def on_one_device(balance: float) -> parity.Reference:
    """The whole batch at once."""
    return parity.reference(job(balance), replicas=1, microbatches=1)


def run(directives: list[Any], mesh: Mesh) -> Any:
    made = piper.compile(job(0.5), piper.Strategy(mesh, directives))
    return piper.execute(made, steps=parity.STEPS, launcher="inline", gradients=True)


@pytest.mark.long
def test_it_is_the_same_under_a_pipeline_of_replicas_that_share_layers() -> None:
    stages = [recipes.one_f_one_b(pp=2, microbatches=2), recipes.data_parallel(zero=1)]
    found = run([piper.shard(piper.where(), stream="tokens"), *stages], Mesh(tp=2, pp=2, dp=2))
    parity.assert_parity(found, on_one_device(0.5), label="balance")
    with pytest.raises(AssertionError):
        parity.assert_parity(found, on_one_device(0.0), label="without it")


BIDIRECTIONAL = (
    Mesh(pp=2, dp=2),
    (*recipes.dualpipe(pp=2, microbatches=4), *recipes.data_parallel()),
)


def logged(mesh: Mesh, directives: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    made = piper.compile(job(0.5), piper.Strategy(mesh, directives))
    piper.execute(
        made, steps=2, launcher="inline", on_step=lambda record: found.append(dict(record.experts))
    )
    return found


@cache
def alone() -> list[dict[str, Any]]:
    """Return what one device logs, in microbatches as large as those of the others."""
    return logged(Mesh(pp=1), (piper.split(piper.where(), microbatches=4),))


@pytest.mark.long
def test_every_token_of_a_step_is_counted_once() -> None:
    """8 rows of 8 tokens choose two experts each; a row has four places of each expert."""
    torch.manual_seed(0)
    for step in alone():
        assert [*step] == ["layers.0.feed_forward", "layers.1.feed_forward"]
        for of in step.values():
            assert sum(of["tokens"]) == 128 and of["mean"] == 32 and of["max"] == max(of["tokens"])
            assert 0 < of["overflow"] < 128
    assert logged(*BIDIRECTIONAL) == alone(), (
        "both directions, two replicas and two microbatches each way"
    )


@pytest.mark.long
def test_a_dropless_mixture_is_counted_and_nothing_overflows() -> None:
    found: list[dict[str, Any]] = []
    work = models.job(
        CONFIG.with_experts(capacity_factor=None), global_batch=8, precision="float64"
    )
    made = piper.compile(work, piper.Strategy(Mesh(pp=1), ()))
    piper.execute(
        made, steps=1, launcher="inline", on_step=lambda record: found.append(dict(record.experts))
    )
    for of, bounded in zip(found[0].values(), alone()[0].values(), strict=True):
        assert sum(of["tokens"]) == 128 and of["mean"] == 32 and of["max"] == max(of["tokens"]) > 32
        assert of["overflow"] == 0 < bounded["overflow"]


class Picking(nn.Module):
    """Layers of experts that a token chooses by what the batch says of it, and that count their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(steered.WIDTH, steered.WIDTH)
        self.layers = nn.ModuleList(Counted(layer) for layer in range(2))

    def forward(self, given: Tensor) -> Tensor:
        x = self.first(given)
        for layer in self.layers:
            x = layer(x, given)
        return x


class Counted(steered.Steered):
    expert_tokens: Tensor

    def __init__(self, layer: int) -> None:
        super().__init__((8, 8, 8, 8))
        self.layer = layer
        self.register_buffer(
            "expert_tokens", torch.zeros(2 * steered.EXPERTS, dtype=torch.int64), persistent=False
        )

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        tokens, chosen = x.flatten(0, 1), picks(given, self.layer).flatten(0, 1)
        chose = (
            chosen.flatten().unsqueeze(-1) == torch.arange(steered.EXPERTS, device=x.device)
        ).sum(0)
        self.expert_tokens = torch.cat((chose, torch.zeros_like(chose)))
        with piper.region(experts=0):
            rows, counts = route(tokens, chosen, steered.EXPERTS)
            made = grouped_mm(grouped_mm(rows, counts, self.up).tanh(), counts, self.down)
            y = unroute(made, chosen, self.router(tokens)[:, : steered.TOP])
        return x + y.view_as(x)


def picks(given: Tensor, layer: int) -> Tensor:
    """Two experts [rows, T, 2] of each token: more often some of them, in each layer others."""
    return ((given[..., :2].abs() * 4).long() + 3 * layer) % steered.EXPERTS


@pytest.mark.long
@pytest.mark.parametrize("recomputed", [False, True])
def test_rows_without_a_place_on_a_device_are_counted(recomputed: bool, tmp_path: Path) -> None:
    """A device sends each other one at most 0.9 times the mean of a microbatch: 15 of 32 choices of each of two
    rows."""
    microbatches, slot = 2, 2 * math.ceil(0.9 * 32 / 2)
    again = [piper.recompute(piper.where(), keep="inputs")] * recomputed
    shared = piper.shard(
        piper.where(experts=piper.ANY),
        over="ep",
        index="experts",
        stream="rows",
        bound=0.9,
        overflow="drop",
    )
    split = piper.split(piper.where(), microbatches=microbatches)
    exact = piper.Precision(params="float64")
    work = piper.Job(
        Picking,
        steered.batch,
        F.mse_loss,
        adamw,
        global_batch=8,
        precision=exact,
        tokens_per_row=steered.TOKENS,
    )
    made = piper.compile(
        work,
        piper.Strategy(Mesh(ep=2), [shared, split, *again, *recipes.data_parallel(over=("ep",))]),
    )
    piper.execute(made, steps=2, launcher="inline", folder=tmp_path)
    every = []
    for step, line in enumerate(
        map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    ):
        given, dropped = steered.batch(step, range(8))[0], []
        for layer in range(2):
            devices = picks(given, layer).flatten(1) // (steered.EXPERTS // 2)
            sent = torch.stack([(devices == d).sum(1) for d in range(2)]).view(2, -1, 2).sum(-1)
            dropped.append(int((sent - slot).clamp(min=0).sum()))
        assert [of["dropped"] for of in line["experts"].values()] == dropped and min(dropped) > 0, (
            sent
        )
        every.append(dropped)
        assert all(
            sum(of["tokens"]) == 8 * 32 and not of["overflow"] for of in line["experts"].values()
        )
    found = load(tmp_path, made.plan).experts
    assert found is not None and [layer.dropped for layer in found.layers.values()] == [
        sum(of) for of in zip(*every)
    ]
    assert {layer.ranks for layer in found.layers.values()} == {2}, (
        "which have two of the experts each"
    )
    assert "rows that found no place on a device" in layer_sheet(found).table.notes[0]


@pytest.mark.long
def test_microbatches_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(self: RankState, buffer: str, tokens: torch.Tensor) -> None:
        self.counted[buffer] = self.store.buffers[buffer].copy_(tokens)

    right = alone()  # kept for other tests, so it must not be made with the fault
    monkeypatch.setattr(RankState, "count", last)
    assert logged(*BIDIRECTIONAL) != right


@pytest.mark.long
def test_a_step_writes_them_down(tmp_path: Path) -> None:
    log = JsonLines(tmp_path)
    metrics = StepMetrics(0, 1.0, 0.1, None, 0.0, experts=alone()[0])
    log.write(metrics)
    log.write(replace(metrics, step=1, experts={}))
    log.close()
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["experts"] == alone()[0] and "experts" not in second, (
        "a model without experts has no such key"
    )
    of = alone()[0]["layers.0.feed_forward"]
    assert metrics.scalars()["experts/layers.0.feed_forward/max over mean"] == of["max"] / 32
    read = load(tmp_path)
    assert read.experts is not None and [*read.experts.steps] == [0] and len(read.metrics) == 2
    assert [layer.tokens for layer in read.experts.layers.values()] == [
        of["tokens"] for of in alone()[0].values()
    ]
    plan = piper.compile(job(0.5), piper.Strategy(Mesh(pp=1), ())).plan
    found = simulate(plan, "h100x1", load=tmp_path)
    assert found.load is not None and (found.load.source, found.load.mean) == ("measured", 1.0), (
        "one rank has all"
    )
    assert not any("load of the experts" in note for note in found.notes)
    assert any(
        "load of the experts is not measured" in note for note in simulate(plan, "h100x1").notes
    )


def test_counts_are_added_over_ranks_in_the_order_of_layers() -> None:
    found = experts_of(
        [
            {"layers.10.e.expert_tokens": [1, 2, 0, 1]},
            {"layers.9.e.expert_tokens": [3, 4, 1, 0]},
            {},
        ]
        * 2
    )
    assert [*found] == ["layers.9.e", "layers.10.e"]
    assert found["layers.10.e"] == {"mean": 3.0, "max": 4, "overflow": 2, "tokens": [2, 4]}
    assert counts_tokens("layers.3.expert_tokens") and not counts_tokens("expert_tokens.weight")


@pytest.mark.long
def test_devices_that_share_experts_count_their_own_rows() -> None:
    shared = (
        *recipes.expert_parallel(),
        *recipes.one_f_one_b(pp=2, microbatches=2),
        *recipes.data_parallel(over=("ep",)),
    )
    assert logged(Mesh(ep=2, pp=2), shared) == alone()
