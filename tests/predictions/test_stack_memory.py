"""The buffers of a software stack count wherever a plan is judged to fit: in simulations, verdicts and searches."""

from __future__ import annotations

from dataclasses import replace

import pytest

import piper
from piper import models
from piper_autotune import NothingFoundError
from piper_compiler import Strategy
from piper_simulator import load_cluster

CLUSTER = load_cluster("h100x2@hopper-megatron")
SIZES = models.LlamaConfig(layers=2, width=64, heads=4, kv_heads=2, hidden=96, vocab=512, length=64)


@pytest.fixture(scope="module")
def job() -> piper.Job:
    return models.job(SIZES, global_batch=8)


def strategy(trial: object) -> Strategy:
    return Strategy(piper.Mesh(dp=2), piper.recipes.data_parallel())


def test_a_plan_that_fits_but_for_the_buffers_of_its_software_does_not_fit(job: piper.Job) -> None:
    plan = piper.compile(job, strategy(None)).plan
    assert CLUSTER.device.stack is not None and CLUSTER.device.stack.holds
    bare = CLUSTER.each_device(lambda d: replace(d, stack=replace(d.stack, holds=(), loss_keeps=0)))
    needs, tensors = (max(piper.simulate(plan, c).device_bytes) for c in (CLUSTER, bare))
    assert tensors < needs
    short = CLUSTER.each_device(lambda d: replace(d, memory_bytes=needs - 1))
    verdict = piper.simulate(plan, short).oom
    assert verdict is not None and (verdict.needs, verdict.over) == (needs, 1)
    assert piper.simulate(plan, bare.each_device(lambda d: replace(d, memory_bytes=tensors))).fits
    study = piper.tune(job, strategy, cluster=CLUSTER, trials=1, workers=0)
    assert study.best_row is not None and study.best_row.device_bytes == needs
    with pytest.raises(NothingFoundError, match="1 B more than the limit"):
        piper.tune(job, strategy, cluster=short, trials=1, workers=0)
