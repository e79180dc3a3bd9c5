"""Compare the CPU time of a step whose random numbers are drawn by row with that under torch's own generator.

The model is a GPT of the sizes of `step_model.LARGE` with dropout 0.1 of the embedding, of attention's probabilities
and of what each part adds. Runs of a few steps alternate in one process, and which one goes first alternates too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

import piper
from benchmarks.measure import Goal, Row, pairs_row
from benchmarks.step_model import LARGE, VOCAB, adamw, batch, loss
from piper.models import GPTConfig

PAIRS, QUICK_PAIRS, STEPS = 15, 2, 3
GOAL = Goal("below", 1.05)


class _Timed:
    """Be a batch function that notes the CPU time at which each step begins."""

    def __init__(self, rows: int) -> None:
        self._rows, self.began = rows, list[float]()

    def __call__(self, step: int, rows: range) -> tuple[Tensor, Tensor]:
        if rows.start == 0:
            self.began.append(time.process_time())
        return batch(LARGE.context, self._rows, step, rows)


def rows(quick: bool) -> Iterator[Row]:
    """Return the ratio of CPU seconds per step, by row over torch's own."""
    torch.set_num_threads(1)
    count = LARGE.rows * LARGE.microbatches
    sizes = GPTConfig(
        layers=LARGE.layers,
        width=LARGE.width,
        heads=LARGE.heads,
        vocab=VOCAB,
        length=LARGE.context,
        tied=False,
        dropout=0.1,
    )
    timed = _Timed(count)
    job = piper.Job(sizes.build, timed, loss, adamw, global_batch=count)
    strategy = piper.Strategy(
        piper.Mesh(), [piper.split(piper.where(), microbatches=LARGE.microbatches)]
    )
    sides = [
        piper.compile(replace(job, draws=draws), strategy) for draws in ("rows", "microbatches")
    ]
    measured: list[list[float]] = [[], []]
    for pair in range(QUICK_PAIRS if quick else PAIRS):
        for side in (0, 1) if pair % 2 else (1, 0):
            timed.began.clear()
            piper.execute(sides[side], steps=STEPS + 1, launcher="inline", memory=False)
            first, last = timed.began[1], timed.began[-1]
            measured[side].append((last - first) / (STEPS - 1))
    by_row, torchs = measured
    note = (
        f"CPU of {STEPS - 1} steps: {1e3 * median(by_row):.0f}, {1e3 * median(torchs):.0f} ms each"
    )
    title = "GPT with dropout 0.1: by row / torch's own"
    yield pairs_row("draws", title, by_row, torchs, GOAL, note)
