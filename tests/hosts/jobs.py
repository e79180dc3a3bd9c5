"""The jobs that several machines train: a small network in float64 over four or two ranks, at a given pace."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from piper.cli.loading import load_file
from tests.helpers import parity
from tests.helpers.command_line import GOOD, RECIPE

STEPS = 6
SETTINGS = """
import dataclasses, os, pathlib, time
def _at_pace(step, rows, whole=batch):
    if step >= {slow_from}:
        pathlib.Path(__file__).with_name(f"at-{{os.environ.get('RANK', 0)}}").touch()
        time.sleep({pause_s})
    return whole(step, rows)
job = dataclasses.replace(job, batch=_at_pace, precision="float64")
steps = {steps}
"""
FOUR = """
strategy = piper.Strategy(piper.Mesh(pp=2, dp=2), (*piper.recipes.gpipe(pp=2, microbatches=2), *piper.recipes.data_parallel()))
"""


def recipe(
    folder: Path, pause_s: float = 0.0, *, ranks: int = 2, slow_from: int = 2, steps: int = STEPS
) -> Path:
    """Write a file that trains two stages, or each of them twice; batches take a pause from a step on."""
    path = folder / "recipe.py"
    strategy = FOUR if ranks == 4 else GOOD
    settings = SETTINGS.format(slow_from=slow_from, pause_s=pause_s, steps=steps)
    path.write_text(RECIPE + strategy + settings)
    return path


def await_files(*paths: Path, seconds: float = 240) -> None:
    """Wait until files are there."""
    end = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, paths
        time.sleep(0.05)


def assert_trained(
    path: Path, folder: Path, *, ranks: int = 2, first: int = 0, steps: int = STEPS
) -> None:
    """Compare the results of a run of a recipe with plain PyTorch on one device, to 1e-9, from its first step on."""
    job = load_file(path, {}).job
    expected = parity.reference(job, replicas=ranks // 2, microbatches=2, steps=steps)
    losses = json.loads((folder / "measured.json").read_text())["losses"]
    assert losses == pytest.approx(expected.losses[first:], rel=1e-9)
    found: dict[str, Tensor] = torch.load(folder / "weights.pt", weights_only=True)
    torch.testing.assert_close(found, dict(expected.state_dict), rtol=1e-9, atol=1e-9)
