"""A prediction under a stack that fuses kernels is smooth in the sizes of a model, also where two of them are equal."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

import piper
from piper import Mesh, Strategy, models, recipes, where
from piper_ir.ground.errors import PiperWarning

STACKS = ("h100x4@hopper-megatron", "b200x4@blackwell-megatron", "h100x4@hopper-nemo")
WIDTH, LENGTH = 4096, 4096
LLAMA = models.LlamaConfig(
    layers=2, width=WIDTH, heads=32, kv_heads=32, hidden=WIDTH, vocab=64, length=LENGTH
)
GPT = models.GPTConfig(layers=2, width=WIDTH, heads=32, vocab=64, length=LENGTH, hidden=4 * WIDTH)


def seconds(config: models.DecoderConfig, tp: int) -> list[float]:
    """Return the step on each stack, in microbatches of one row."""
    precision = piper.Precision(params="float32", compute="bfloat16")
    job = models.job(config, global_batch=4, precision=precision)
    shards = recipes.tensor_parallel() if tp > 1 else ()
    strategy = Strategy(Mesh(tp=tp), (*shards, piper.split(where(), microbatches=4)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PiperWarning)
        plan = piper.compile(job, strategy).plan
        return [piper.simulate(plan, stack).step_s for stack in STACKS]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("config", "tp"), [(LLAMA, 1), (GPT, 4)], ids=["llama", "gpt"])
def test_a_step_is_the_mean_of_those_of_a_smaller_and_a_larger_model(
    config: models.DecoderConfig, tp: int
) -> None:
    """A device's feed-forward part is as wide as the model, and all tensors of a layer are of one size."""
    steps = [seconds(replace(config, hidden=config.hidden + 128 * tp * k), tp) for k in (-1, 0, 1)]
    for below, there, above in zip(*steps, strict=True):
        assert there == pytest.approx((below + above) / 2, rel=0.01)
