"""Measure a hundred strategies of one model: how often it is captured, and how long compiling them takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice, product
from statistics import median

import piper
from benchmarks.measure import Goal, Row
from benchmarks.step_model import GPT, SMALL, job
from piper.api.captures import capturing
from piper_capture import Traced
from piper_runtime import Job

COUNT, QUICK_COUNT = 100, 10
GLOBAL_BATCH = 64
MODEL = replace(SMALL, layers=8)
ONCE = Goal("below", 2)


@contextmanager
def counted() -> Iterator[list[Job]]:
    """Collect the jobs that are captured meanwhile.

    The model itself must not count: what it holds says which model it is.
    """
    captured: list[Job] = []
    plain = capturing._capture

    def counting(job: Job, evaluating: bool = False) -> Traced:
        captured.append(job)
        return plain(job, evaluating)

    capturing._capture = counting
    try:
        yield captured
    finally:
        capturing._capture = plain


def strategies() -> Iterator[piper.Strategy]:
    """Return pipelines of 1 to 8 stages, in two schedules, 1 to 16 microbatches, 1 to 4 replicas."""
    recipes = piper.recipes
    for m, dp, pp, recipe in product(
        (4, 1, 8, 2, 16), (1, 2, 4), (1, 2, 4, 8), (recipes.one_f_one_b, recipes.gpipe)
    ):
        mesh = piper.Mesh(pp=pp, dp=dp)
        yield piper.Strategy(
            mesh, (*recipe(pp=pp, microbatches=m), *recipes.data_parallel(over=("dp",)))
        )


def rows(quick: bool) -> list[Row]:
    """Return captures, and seconds in total and per strategy after the first."""
    count = QUICK_COUNT if quick else COUNT
    work = replace(job(MODEL, GLOBAL_BATCH), model=partial(GPT, MODEL))
    seconds, instructions = [], 0
    with counted() as captured:
        for strategy in islice(strategies(), count):
            begin = time.perf_counter()
            plan = piper.compile(work, strategy).plan
            seconds.append(time.perf_counter() - begin)
            instructions += sum(len(r.program) for r in plan.roles)
    if len(seconds) != count:
        raise RuntimeError(f"there are {len(seconds)} strategies, {count} were wanted")
    what = f"{count} strategies of a GPT of {MODEL.layers} layers"
    plans = f"plans of {instructions:,} instructions altogether; the first {seconds[0]:.2f} s"
    return [
        Row(
            "capture",
            f"{what}: captures",
            len(captured),
            "",
            goal=ONCE,
            note="times that the model was captured",
        ),
        Row("capture", f"{what}: total", sum(seconds), "s", note=plans),
        Row(
            "capture",
            f"{what}: each after the first",
            median(seconds[1:]),
            "s",
            min(seconds[1:]),
            max(seconds[1:]),
        ),
    ]
