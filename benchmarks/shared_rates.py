"""Measure how fast strategies become plans, and plans are verified, where ranks share all states and keep nothing."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import TypeVar

import piper
from benchmarks.measure import Goal, Row
from piper import models
from piper.api.captures.capturing import captured_job
from piper_ir.verify import verify

T = TypeVar("T")
LAYERS, STAGES, REPLICAS = 64, 8, 2
BY_MICROBATCHES = (16, 32, 64)
"""The one in the middle is the size that the goals are for."""
COMPILE_GOAL, VERIFY_GOAL, GROWTH_GOAL = Goal("below", 2.5), Goal("below", 2.0), Goal("below", 2.3)
"""Seconds for 16,000 instructions and more, and times as long for twice as many microbatches."""


def rows(quick: bool) -> list[Row]:
    """Return CPU seconds of both at each size, best of the repetitions, and the growth per doubling."""
    repeats = 1 if quick else 3
    sizes = BY_MICROBATCHES[: 2 if quick else None]
    taken: dict[int, list[tuple[float, float]]] = {m: [] for m in sizes}
    counts: dict[int, int] = {}
    for _ in range(repeats):  # in turn: a machine that is slow for a while is so for all of them
        for m in sizes:
            counts[m], seconds = measured(m)
            taken[m].append(seconds)
    out = []
    for part, (name, goal) in enumerate((("compile", COMPILE_GOAL), ("verify", VERIFY_GOAL))):
        title = f"GPT of {LAYERS} layers, pp={STAGES} x dp={REPLICAS}, zero=3, resident_mb=0"
        for m in sizes:
            found = [s[part] for s in taken[m]]
            note = f"{counts[m]:,} instructions"
            goal_here = goal if m == BY_MICROBATCHES[1] else None
            out.append(
                Row(
                    "compile",
                    f"{title}, m={m}: {name}",
                    median(found),
                    "CPU s",
                    min(found),
                    max(found),
                    goal_here,
                    note,
                )
            )
        for a, b in pairwise(sizes):
            growth = min(s[part] for s in taken[b]) / min(s[part] for s in taken[a])
            out.append(
                Row(
                    "compile",
                    f"growth, {title}, m={a} to {b}: {name}",
                    growth,
                    "x",
                    goal=GROWTH_GOAL,
                )
            )
    return out


def measured(microbatches: int) -> tuple[int, tuple[float, float]]:
    """Return the instructions of a plan, and the CPU seconds of its compilation and verification.

    Layers are small, which changes nothing that is planned; a bucket is a layer's matrix, or what is beside it.
    """
    config = models.GPTConfig(layers=LAYERS, width=64, heads=4, vocab=256, length=64)
    job = models.job(config, global_batch=microbatches * REPLICAS)
    captured_job(job)
    replicas = piper.recipes.data_parallel(zero=3, bucket_mb=0.1)
    directives = (*piper.recipes.one_f_one_b(pp=STAGES, microbatches=microbatches), *replicas)
    strategy = piper.Strategy(piper.Mesh(pp=STAGES, dp=REPLICAS), directives)
    compiled, compile_s = _timed(lambda: piper.compile(job, strategy))
    _, verify_s = _timed(lambda: verify(compiled.plan))
    return sum(len(role.program) for role in compiled.plan.roles), (compile_s, verify_s)


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    gc.collect()
    begin = time.process_time()
    found = call()
    return found, time.process_time() - begin
