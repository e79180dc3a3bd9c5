"""Measure what a batch function that takes half a step costs when a loader calls it beside compute.

Two processes run 1F1B (pp=2). In each round every case runs once, and the first of a round changes. A case is compared
with the same plan on a quick batch function without a loader, in the same round. The slow function waits, as for a
disk; it takes no CPU time, which two busy cores could not give it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import piper
from benchmarks.measure import Goal, Row, median_interval
from benchmarks.step_model import LARGE, SMALL, Regime, job
from piper_runtime.launch import Pool

SHARE = 0.5
"""The seconds of the slow function in a step of a rank, as a share of the step without it."""
SETTLED = 4
"""The first steps of a run, which are not counted: optimizer state is made, and a thread starts in the third."""
GOAL, FREE = Goal("below", 1.03), Goal("below", 1.01)


@dataclass(frozen=True)
class Case:
    """Say who calls which function, and the goal for its step time over that of `BASE`."""

    name: str
    slow: bool
    loader: str | int
    goal: Goal | None = None


BASE = Case("quick, no loader", False, "none")
CASES = (
    BASE,
    Case("quick, thread allowed", False, "thread", FREE),
    Case("half a step, thread", True, "thread", GOAL),
    Case("half a step, a process", True, 1, GOAL),
    Case("half a step, no loader", True, "none"),
)


def rows(quick: bool) -> Iterator[Row]:
    """Return the rows of a plan with short steps, and of one with long steps."""
    with Pool(2) as pool:
        for regime, rounds, steps in ((SMALL, 3, 20), (LARGE, 1, 8)) if quick else ((SMALL, 20, 44), (LARGE, 5, 12)):
            yield from measured(pool, regime, rounds, steps)


def measured(pool: Any, regime: Regime, rounds: int, steps: int) -> Iterator[Row]:
    """Run all cases in rounds; return the step time of the base, and the ratio to it of every other case."""
    work = job(regime, regime.rows * regime.microbatches)
    strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=regime.microbatches))
    compiled = piper.compile(work, strategy)
    run = partial(step_s, pool, compiled, steps)
    nap_s = SHARE * run(work, BASE.loader) / regime.microbatches
    napping = replace(work, batch=partial(napped, nap_s, work.batch))
    found: dict[Case, list[float]] = {case: [] for case in CASES}
    for k in range(rounds):
        for case in (*CASES[k % len(CASES) :], *CASES[: k % len(CASES)]):
            found[case].append(run(napping if case.slow else work, case.loader))
    base = found[BASE]
    yield Row("loader", f"{regime.name}: {BASE.name}", median(base) * 1e3, "ms/step", min(base) * 1e3, max(base) * 1e3)
    note = f"{rounds} rounds of {steps} steps; median and its 95 % interval, whose upper end the goal is for"
    for case in CASES[1:]:
        middle, low, high = median_interval([s / b for s, b in zip(found[case], base, strict=True)])
        yield Row("loader", f"{regime.name}: {case.name}", middle, "ratio", low, high, case.goal, note, judged=high)


def step_s(pool: Any, compiled: piper.Compiled, steps: int, work: piper.Job, loader: str | int) -> float:
    """Return the median seconds of a step."""
    run = piper.execute(compiled, work, steps=steps, launcher="processes", pool=pool, memory=False, loader=loader)
    return median(run.step_s[SETTLED:])


def napped(nap_s: float, of: Any, step: int, rows: range) -> Any:
    """Return what a batch function returns, later."""
    time.sleep(nap_s)
    return of(step, rows)
