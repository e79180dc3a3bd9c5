"""Measure the seconds from the kill of a worker to the end of the next step of its run.

A small GPT trains on two workers and saves every step. One of the workers kills itself at a random instant and
writes it down. The launcher notices, ends the other worker, starts both again, reads the newest checkpoint, and trains.
The interval ends when the launcher hears of the first step that was not done before; one or two are done again for it.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import piper
from benchmarks.measure import Goal, Row
from piper_ir.ground.errors import ExecutionError, PiperWarning
from piper_runtime.launch import Restart, StepRecord, open_pool

KILLED_S = (0.3, 1.3)
"""The least and the longest time from the fourth step of an attempt to its kill."""
GOALS = {"processes": Goal("below", 8.0), "ray": Goal("below", 15.0)}
EVERY, STEPS = 1, 100_000
ENOUGH = "enough"
"""The name of the file that ends the run."""


class KilledBatches:
    """Give the batches of a job, and kill the process that comes first in every attempt, until enough is measured."""

    def __init__(self, batch: Any, folder: Path) -> None:
        self.batch, self.folder = batch, folder
        self._first = -1
        self._armed = False

    def __call__(self, step: int, rows: range) -> Any:
        self._first = step if self._first < 0 else self._first
        if not self._armed and step > self._first + 2:
            self._armed = True
            self._arm()
        if (self.folder / ENOUGH).exists():
            raise StopIteration("all kills are measured")
        return self.batch(step, rows)

    def _arm(self) -> None:
        """Kill this process after a while, unless another one is to be killed in this attempt."""
        attempt = len([*self.folder.glob("failed-*")])
        try:
            (self.folder / f"armed-{attempt}").touch(exist_ok=False)
        except FileExistsError:
            return
        threading.Timer(random.Random(attempt).uniform(*KILLED_S), self._die, [attempt]).start()

    def _die(self, attempt: int) -> None:
        if (self.folder / ENOUGH).exists():
            return
        (self.folder / f"killed-{attempt}").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)


def intervals(launcher: str, kills: int) -> list[float]:
    """Return the seconds of each kill of one run, which ends when all are measured."""
    from examples.gpt_text import job

    compiled = piper.compile(
        job, piper.Strategy(piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=8))
    )
    found, pending = list[float](), list[bool]()
    with tempfile.TemporaryDirectory() as name, open_pool(launcher, 2) as pool:
        folder = Path(name)

        def failed(restart: Restart) -> None:
            (folder / f"failed-{len([*folder.glob('failed-*')])}").touch()
            pending.append(True)

        def heard(record: StepRecord) -> None:
            if pending:  # of kills without a step in between, the interval of the last one counts
                pending.clear()
                last = len([*folder.glob("failed-*")]) - 1
                found.append(time.monotonic() - float((folder / f"killed-{last}").read_text()))
                if len(found) == kills:
                    (folder / ENOUGH).touch()

        killed = replace(job, batch=KilledBatches(job.batch, folder))
        saved = piper.Checkpoints(folder / "saved", every=EVERY)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PiperWarning)
            try:
                piper.execute(
                    compiled, killed, steps=STEPS, launcher=launcher, pool=pool, checkpoint=saved, restarts=3 * kills,
                    on_step=heard, on_restart=failed, memory=False,
                )  # fmt: skip
            except ExecutionError:
                if len(found) < kills:
                    raise
    return found


def rows(quick: bool) -> Iterator[Row]:
    """Return the rows of both launchers, on this machine; the goal is for the median."""
    kills = 2 if quick else 10
    for launcher, goal in GOALS.items():
        found = intervals(launcher, kills)
        note = (
            f"a GPT of 1.2 million parameters, 2 workers, {kills} kills at random instants; low "
            f"and high are the extremes"
        )
        yield Row(
            "recovery",
            f"{launcher}, kill to next finished step",
            median(found),
            "s",
            min(found),
            max(found),
            goal,
            note,
        )
