"""The loss that balances experts: what loops compute, none by default, and the same under every plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import piper
from piper import Mesh, models, recipes
from piper.models.moe import Experts
from piper_ir.errors import JobError
from tests import parity
from tests.compositions import adamw

CONFIG = models.MoEConfig(layers=2, width=16, heads=4, kv_heads=2, hidden=16, vocab=32, length=8, experts=4, top_k=2, balance=0.5)


def test_it_is_how_often_an_expert_is_chosen_times_its_mean_score() -> None:
    """Expert by expert and row by row; all experts alike give 1, and a row that loves one of them more."""
    experts = Experts(CONFIG).double()
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
    plain, tokens = replace(CONFIG, balance=0.0), torch.zeros(2, 8, dtype=torch.int64)
    assert isinstance(plain.build()(tokens), Tensor) and len(CONFIG.build()(tokens)) == 2
    for wrong in (-0.1, float("nan"), float("inf")):
        with pytest.raises(JobError, match=r"balance=.*a number from 0 on is needed, such as 0.001"):
            replace(CONFIG, balance=wrong)


@cache
def job(balance: float) -> Any:
    made = models.job(replace(CONFIG, balance=balance), global_batch=8, precision="float64")
    return replace(made, optimizer=adamw, clip_norm=0.5)


@cache
def on_one_device(balance: float) -> parity.Reference:
    """The whole batch at once."""
    return parity.reference(job(balance), replicas=1, microbatches=1, head="")


def run(directives: list[Any], mesh: Mesh) -> Any:
    made = piper.compile(job(0.5), piper.Strategy(mesh, directives))
    return piper.execute(made, steps=parity.STEPS, launcher="inline", gradients=True)


def test_it_is_the_same_under_a_pipeline_of_replicas_that_share_layers() -> None:
    stages = [recipes.one_f_one_b(pp=2, microbatches=2), recipes.data_parallel(zero=1)]
    found = run([piper.shard(piper.where(), stream="tokens"), *stages], Mesh(tp=2, pp=2, dp=2))
    parity.assert_parity(found, on_one_device(0.5), label="balance")
    with pytest.raises(AssertionError):
        parity.assert_parity(found, on_one_device(0.0), label="without it")
