"""Measure what an asynchronous save costs the steps beside it, and for how long it blocks a rank.

Two processes train a GPT by 1F1B (pp=2). Runs that save after every so many steps alternate with runs that never do,
and which of the two goes first alternates as well. A step counts as beside a save from the end of the step that is
saved until the launcher has completed the checkpoint. It begins with the time for which the save blocks the rank. The
files go to the folder for temporary files.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import piper
from benchmarks.loader import Subject, gpt
from benchmarks.measure import Goal, Row, extremes_row, pairs_row
from benchmarks.step_model import LARGE, SMALL, Regime
from piper_runtime.launch import Pool, execute

GOAL = Goal("below", 1.10)
BLOCKED_GOAL = Goal("below", 5.0)
SETTLED = 4
"""The first steps of a run, which are not counted."""
PAIRS, QUICK_PAIRS = 10, 1
CASES: tuple[tuple[Regime, int, int], ...] = ((LARGE, 16, 4), (SMALL, 100, 24))
"""The models, each with the steps of a run and of them from one save to the next."""


@dataclass
class Heard:
    """Hold what the launcher hears of a run.

    Attributes:
        finished: by rank, when each step was done.
        saves: of each rank's share of a checkpoint, the steps that it is after, the milliseconds of the copy and for
            which the rank was blocked, and when the launcher was done with it.
    """

    finished: dict[int, list[float]] = field(default_factory=dict)
    saves: list[tuple[int, float, float, float]] = field(default_factory=list)

    def step_s(self) -> list[float]:
        """Return the seconds of each step but the first, on the slower rank."""
        ranks = [[b - a for a, b in pairwise(times)] for times in self.finished.values()]
        return [max(found) for found in zip(*ranks, strict=True)]

    def beside(self) -> set[int]:
        """Return the indices in `step_s` of the steps beside a save; the last save has no step beside it."""
        out: set[int] = set()
        first = min(self.finished)
        for done, _, _, ended in self.saves:
            times = self.finished[first]
            out |= {i for i in range(done - 1, len(times) - 1) if times[i] < ended}
        return out


class Listening:
    """Run a plan with the workers of a pool, and keep what the launcher hears."""

    def __init__(self, pool: Pool):
        self._pool, self.world = pool, pool.world
        self.heard = Heard()

    def run(
        self,
        plan: Any,
        requests: Mapping[int, Any],
        timeout_s: float,
        on_step: Any = None,
        on_save: Any = None,
    ) -> dict[int, Any]:
        self.heard = Heard()
        reports = self._pool.run(
            plan, requests, timeout_s, on_step, None if on_save is None else self._kept(on_save)
        )
        self.heard.finished = {rank: report.finished for rank, report in reports.items()}
        return reports

    def _kept(self, on_save: Callable[[Any], object]) -> Callable[[Any], None]:
        def save(done: Any) -> None:
            on_save(done)
            self.heard.saves.append(
                (done.step, 1e3 * done.copied_s, 1e3 * done.blocked_s, time.perf_counter())
            )

        return save

    def close(self) -> None:
        self._pool.close()

    def room(self) -> float:
        return self._pool.room()

    def __enter__(self) -> Listening:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rows(quick: bool) -> Iterator[Row]:
    """Return the rows of both models; `quick`: of the small one."""
    with Listening(Pool(2)) as workers:
        for regime, steps, every in CASES[1:] if quick else CASES:
            yield from measured(workers, gpt(regime), QUICK_PAIRS if quick else PAIRS, steps, every)


def measured(
    workers: Listening, subject: Subject, pairs: int, steps: int, every: int
) -> Iterator[Row]:
    """Run pairs; return the ratio of steps beside a save to others, and the time for which a save blocks a rank."""
    with_s, without_s, base, beside, blocked, copied, counts = (list[float]() for _ in range(7))
    heard(workers, subject, 2 * SETTLED, None)
    for pair in range(pairs):
        sides = {
            every_: heard(workers, subject, steps, every_)
            for every_ in ((None, every), (every, None))[pair % 2]
        }
        saves = [save for save in sides[every].saves if SETTLED < save[0] < steps]
        seconds, chosen = sides[every].step_s(), sides[every].beside()
        slow = [seconds[i] for i in sorted(chosen) if i >= SETTLED]
        without_s.append(median(sides[None].step_s()[SETTLED:]))
        with_s.append(median(slow))
        base.append(1e3 * without_s[-1])
        beside += [1e3 * s for s in slow]
        counts.append(len(slow) / max(len({done for done, *_ in saves}), 1))
        copied += [copy for _, copy, _, _ in saves]
        blocked += [block - copy for _, copy, block, _ in saves]
    row = partial(extremes_row, "saving")
    name, shares = f"{subject.name} pp=2", f"{len(blocked)} shares; extremes"
    note = f"{steps} steps, a save every {every}; {median(counts):.1f} steps are beside a save"
    yield row(f"{name}: a step", base, "ms", note="without saves; extremes of runs")
    yield row(f"{name}: a step beside a save", beside, "ms", note="extremes")
    title = f"{name}: beside a save / without"
    yield pairs_row("saving", title, with_s, without_s, GOAL, note)
    yield row(f"{name}: copy", copied, "ms", note="of a rank's share; extremes")
    yield row(f"{name}: blocked beyond the copy", blocked, "ms", BLOCKED_GOAL, shares)


def heard(workers: Listening, subject: Subject, steps: int, every: int | None) -> Heard:
    """Run some steps, with saves or without, and return what the launcher heard."""
    with tempfile.TemporaryDirectory() as name:
        saved = (
            None if every is None else piper.Checkpoints(Path(name, "saved"), every=every, keep=1)
        )
        execute(
            subject.plan,
            subject.code,
            subject.job,
            steps=steps,
            launcher="processes",
            pool=workers,
            checkpoint=saved,
        )
    return workers.heard
