"""Measure how long every recipe takes to compile and to simulate, as a large pipeline of given durations."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import TypeVar

import piper
from benchmarks.measure import Goal, Row
from piper.views.recipe_view import ChunkTimes, Pipeline, directives_of
from piper_compiler.interchange import stages_of
from piper_compiler.recipes import RECIPES, Recipe

DEVICES, MICROBATCHES = 16, 128
GOAL = Goal("below", 2.0)
TIMES = ChunkTimes(F=3.0, I=4.0, W=2.0)
REPEATS, QUICK_REPEATS = 3, 1

T = TypeVar("T")


def rows(quick: bool) -> Iterator[Row]:
    """Return two rows per recipe."""
    for name in sorted(RECIPES):
        yield from recipe_rows(RECIPES[name], QUICK_REPEATS if quick else REPEATS)


def recipe_rows(recipe: Recipe, repeats: int) -> list[Row]:
    """Return CPU seconds from the recipe's numbers to a plan, and from the plan to its trace and its period."""

    # Once: a search keeps what it found.
    (making,), directives = _timed(
        lambda: directives_of(recipe, Pipeline(DEVICES, MICROBATCHES), TIMES, {}), 1
    )
    stages = stages_of(directives)
    assert stages is not None, f"recipe {recipe.name} has no partition"
    program = piper.synthetic(stages=stages, F=TIMES.F, I=TIMES.I, W=TIMES.W)
    strategy = piper.Strategy(piper.Mesh(pp=DEVICES), directives)
    compiling, found = _timed(lambda: piper.compile(program, strategy), repeats)
    simulating, _ = _timed(lambda: piper.simulate(found.plan), repeats)
    count = sum(len(role.program) for role in found.plan.roles)
    title = f"{recipe.name} pp={DEVICES} m={MICROBATCHES}, {count:,} instructions"
    own = f"{making:.2f} s of it the recipe itself"
    return [
        Row(
            "recipes",
            f"{step}, {title}",
            median(seconds),
            "CPU s",
            min(seconds),
            max(seconds),
            GOAL,
            note,
        )
        for step, seconds, note in (
            ("compile", [making + s for s in compiling], own),
            ("simulate", simulating, ""),
        )
    ]


def _timed(call: Callable[[], T], repeats: int) -> tuple[list[float], T]:
    """Return the CPU seconds of each call, and what the last one returned.

    Both are one thread that waits for nothing, so CPU time leaves out what else runs on the machine.
    """
    out = []
    for _ in range(repeats):
        gc.collect()
        begin = time.process_time()
        result = call()
        out.append(time.process_time() - begin)
    return out, result
