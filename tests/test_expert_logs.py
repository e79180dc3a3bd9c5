"""Runs log the tokens of experts: as many under every plan as on one device, added on the rank and read once a step."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper import Mesh, models, recipes
from piper.api.metrics import JsonLines, StepMetrics
from piper_ir.expert_tokens import counts_tokens, experts_of
from piper_report.results import _metrics
from piper_runtime.rank.rank_state import RankState
from piper_simulator import simulate

CONFIG = models.MoEConfig(
    layers=2, width=16, heads=2, kv_heads=2, hidden=16, vocab=32, length=8, experts=4, top_k=2, capacity_factor=1.0
)
BIDIRECTIONAL = (Mesh(pp=2, dp=2), (*recipes.dualpipe(pp=2, microbatches=4), *recipes.data_parallel()))


@cache
def job() -> Any:
    return models.job(CONFIG, global_batch=8, precision="float64")


def logged(mesh: Mesh, directives: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    made = piper.compile(job(), piper.Strategy(mesh, directives))
    piper.execute(made, steps=2, launcher="inline", on_step=lambda record: found.append(dict(record.experts)))
    return found


@cache
def alone() -> list[dict[str, Any]]:
    return logged(Mesh(pp=1), ())


def test_every_token_of_a_step_is_counted_once() -> None:
    """8 rows of 8 tokens choose two experts each; a row has four places of each expert."""
    torch.manual_seed(0)
    for step in alone():
        assert [*step] == ["layers.0.feed_forward", "layers.1.feed_forward"]
        for of in step.values():
            assert sum(of["tokens"]) == 128 and of["mean"] == 32 and of["max"] == max(of["tokens"])
            assert 0 < of["overflow"] < 128
    assert logged(*BIDIRECTIONAL) == alone(), "both directions, two replicas and two microbatches each way"


def test_microbatches_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(self: RankState, buffer: str, tokens: torch.Tensor) -> None:
        self.counted[buffer] = self.store.buffers[buffer].copy_(tokens)

    monkeypatch.setattr(RankState, "count", last)
    assert logged(*BIDIRECTIONAL) != alone()


def test_a_step_writes_them_down(tmp_path: Path) -> None:
    log = JsonLines(tmp_path)
    metrics = StepMetrics(0, 1.0, 0.1, None, 0.0, experts=alone()[0])
    log.write(metrics)
    log.write(replace(metrics, step=1, experts={}))
    log.close()
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["experts"] == alone()[0] and "experts" not in second, "a model without experts has no such key"
    of = alone()[0]["layers.0.feed_forward"]
    assert metrics.scalars()["experts/layers.0.feed_forward/max over mean"] == of["max"] / 32
    assert _metrics((tmp_path / "metrics.jsonl").read_text(), "here")[0].experts == alone()[0]
    plan = piper.compile(job(), piper.Strategy(Mesh(pp=1), ())).plan
    found = simulate(plan, "h100x1", load=tmp_path)
    assert found.load is not None and (found.load.source, found.load.mean) == ("measured", 1.0), "one rank has all"
    assert not any("load of the experts" in note for note in found.notes)
    assert any("load of the experts is not measured" in note for note in simulate(plan, "h100x1").notes)


def test_counts_are_added_over_ranks_in_the_order_of_layers() -> None:
    found = experts_of([{"layers.10.e.expert_tokens": [1, 2, 0, 1]}, {"layers.9.e.expert_tokens": [3, 4, 1, 0]}, {}] * 2)
    assert [*found] == ["layers.9.e", "layers.10.e"]
    assert found["layers.10.e"] == {"mean": 3.0, "max": 4, "overflow": 2, "tokens": [2, 4]}
    assert counts_tokens("layers.3.expert_tokens") and not counts_tokens("expert_tokens.weight")
