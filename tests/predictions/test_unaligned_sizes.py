"""A vocabulary that is no multiple of 8 makes products of a head slow; a warning says how much padding it saves."""

from __future__ import annotations

import re
import warnings

import pytest

import piper
from piper import Mesh, Simulation, Strategy, models, recipes
from piper_ir.ground.errors import PiperWarning


def simulated(vocab: int, cluster: str, tp: int = 1) -> Simulation:
    config = models.GPTConfig(layers=2, width=768, heads=12, vocab=vocab, length=1024, tied=True)
    precision = piper.Precision(params="float32", compute="bfloat16")
    job = models.job(config, global_batch=4, precision=precision)
    shards = recipes.tensor_parallel(sequence=True) if tp > 1 else ()
    plan = piper.compile(job, Strategy(Mesh(tp=tp), shards)).plan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PiperWarning)
        return piper.simulate(plan, cluster)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("cluster", "vocab", "tp"),
    [
        ("h100x1@hopper-torch", 50_257, 1),
        ("h100x2@hopper-torch", 50_312, 2),  # 25,156 on each device
        ("a100x1@ampere-torch", 50_257, 1),
    ],
)
def test_padding_saves_what_the_warning_says(cluster: str, vocab: int, tp: int) -> None:
    slow, padded = simulated(vocab, cluster, tp), simulated(50_432, cluster, tp)
    (note,) = [n for n in slow.notes if "features are slow" in n]
    assert str(vocab // tp) in note and not any("features" in n for n in padded.notes)
    (said,) = re.findall(r"\((\d+)%\)", note)
    saved = 1 - padded.step_s / slow.step_s
    assert saved > 0.1 and int(said) / 100 == pytest.approx(saved, abs=0.02)


@pytest.mark.parametrize("cluster", ["h100x1@hopper-torch-compile", "h100x1"])
def test_software_that_pads_matrices_is_not_slow(cluster: str) -> None:
    """torch.compile pads; without a stack the constants are of the best kernels."""
    slow, padded = simulated(50_257, cluster), simulated(50_432, cluster)
    assert slow.step_s == pytest.approx(padded.step_s, rel=0.02)
    assert not any("features" in n for n in slow.notes)
