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
from benchmarks import noop
from benchmarks.measure import Goal, Row, extremes_row, pairs_row
from benchmarks.step_model import LARGE, SMALL, Regime, job
from piper_ir.plan.plan import Plan
from piper_runtime.launch import Pool, execute
from piper_runtime.rank import ShippedCode

SHARE = 0.5
"""The seconds of the slow function in a step of a rank, as a share of the step without it."""
COMPUTE_S = 0.005
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


@dataclass(frozen=True)
class Subject:
    """Hold a plan with its code and job."""

    name: str
    plan: Plan
    code: Any
    job: piper.Job


def rows(quick: bool) -> Iterator[Row]:
    """Return the rows of compute that waits as well, which a busy machine hardly changes, and of a GPT's steps."""
    cases = [(waiting(), 10, 24), (gpt(SMALL), 10, 34), (gpt(LARGE), 4, 10)]
    with Pool(2) as pool:
        for subject, rounds, steps in cases[:1] if quick else cases:
            yield from measured(pool, subject, *((1, 8) if quick else (rounds, steps)))


def waiting() -> Subject:
    """Return a plan whose chunks sleep for COMPUTE_S each."""
    plan = noop.plan(2, 2, 8)
    code = {
        name: {step: _sleeping(c) for step, c in steps.items()} for name, steps in noop.CODE.items()
    }
    return Subject(f"compute sleeps {COMPUTE_S * 1e3:g} ms", plan, code, noop.job(plan))


def _sleeping(code: ShippedCode) -> ShippedCode:
    source = code.source.replace(
        "def step(args):", f"import time\ndef step(args):\n    time.sleep({COMPUTE_S})", 1
    )
    return ShippedCode(source, code.constants)


def gpt(regime: Regime) -> Subject:
    """Return 1F1B of a GPT."""
    work = job(regime, regime.rows * regime.microbatches)
    strategy = piper.Strategy(
        piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=regime.microbatches)
    )
    compiled = piper.compile(work, strategy)
    assert compiled.code is not None
    codes = [c.code for c in compiled.plan.chunks]
    return Subject(
        f"GPT, {regime.name}", compiled.plan, compiled.code.export(codes, compiled.plan.rows), work
    )


def measured(pool: Any, subject: Subject, rounds: int, steps: int) -> Iterator[Row]:
    """Run all cases in rounds; return the step time of the base, and the ratio to it of every other case."""
    run, quick = partial(step_s, pool, subject, steps), subject.job.batch
    nap_s = SHARE * run(quick, BASE.loader) / subject.plan.microbatches
    napping = partial(napped, nap_s, quick)
    seconds: dict[Case, list[float]] = {case: [] for case in CASES}
    for k in range(rounds):
        for case in (*CASES[k % len(CASES) :], *CASES[: k % len(CASES)]):
            seconds[case].append(run(napping if case.slow else quick, case.loader))
    base = seconds[BASE]
    title = f"{subject.name}: {BASE.name}"
    yield extremes_row("loader", title, [1e3 * s for s in base], "ms/step")
    note = f"rounds of {steps} steps; the goal is for the upper end"
    for case in CASES[1:]:
        name = f"{subject.name}: {case.name}"
        yield pairs_row("loader", name, seconds[case], base, case.goal, note)


def step_s(pool: Any, subject: Subject, steps: int, batch: Any, loader: str | int) -> float:
    """Return the median seconds of a step."""
    work = replace(subject.job, batch=batch)
    run = execute(
        subject.plan,
        subject.code,
        work,
        steps=steps,
        launcher="processes",
        pool=pool,
        loader=loader,
    )
    return median(run.step_s[SETTLED:])


def napped(nap_s: float, of: Any, step: int, rows: range) -> Any:
    """Return what a batch function returns, later."""
    time.sleep(nap_s)
    return of(step, rows)
