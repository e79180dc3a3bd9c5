"""Measure what it takes to score a plan of about 5,000 instructions as the tuner does.

It goes from a strategy to period, makespan and peaks, by stage. `compile_rates` shows the rows.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from benchmarks.measure import Goal, Row
from benchmarks.step_model import SMALL, job
from piper.api.captures.capturing import captured_job
from piper_autotune.scoring.scoring import seconds_of
from piper_compiler import Strategy, compile_program, recipes, synthetic
from piper_ir.fold.steady_state import step_and_period
from piper_ir.ground.mesh import Mesh
from piper_ir.program.program import Program
from piper_ir.tools import no_garbage_collection
from piper_simulator import Cluster, DeviceModel, load_cluster

GOAL = Goal("above", 10)
"""Plans per second and core: 20 on two cores."""
DEVICES, MICROBATCHES = 8, 112
"""1F1B of 4,936 instructions, some more with reductions."""
LAYERS = 24
STAGES = ("compile", "durations", "sweep and period")


@dataclass(frozen=True)
class Case:
    """Hold a case; `cluster` is None for a program of given durations."""

    title: str
    program: Program
    strategy: Strategy
    global_batch: int | None = None
    cluster: Cluster | None = None


def rows(quick: bool) -> list[Row]:
    """Return for each case the CPU milliseconds of each stage, and plans per second."""
    layers, microbatches, repeats = (DEVICES, 4, 2) if quick else (LAYERS, MICROBATCHES, 5)
    return [row for case in cases(layers, microbatches) for row in _rows(case, repeats)]


def cases(layers: int, microbatches: int) -> Iterator[Case]:
    """Return a chunk per stage, and a captured GPT in which layers are fused and gradients are reduced in buckets."""
    pipeline = recipes.one_f_one_b(pp=DEVICES, microbatches=microbatches)
    yield Case(
        "8 stages",
        synthetic(stages=DEVICES, F=3, I=4, W=2, params=100),
        Strategy(Mesh(pp=DEVICES), pipeline),
    )
    rows_ = 2 * 2 * microbatches  # two per microbatch and replica
    program = captured_job(job(replace(SMALL, layers=layers), rows_)).program
    both = Strategy(Mesh(pp=DEVICES, dp=2), (*pipeline, *recipes.data_parallel(bucket_mb=0.1)))
    yield Case(f"GPT of {layers} layers x dp=2", program, both, rows_, load_cluster("h100x8*2"))


def _rows(case: Case, repeats: int) -> list[Row]:
    score(case)
    taken = [score(case) for _ in range(repeats)]
    name = f"score 1F1B pp={DEVICES}, {case.title}, {taken[0][1]:,} instructions"
    out = []
    for k, stage in enumerate(STAGES):
        ms = [1e3 * seconds[k] for seconds, _ in taken]
        note = "CPU; with the peaks and what the sweep runs on" if stage == "compile" else "CPU"
        out.append(
            Row("compile", f"{name}: {stage}", median(ms), "ms", min(ms), max(ms), note=note)
        )
    rates = [1 / sum(seconds) for seconds, _ in taken]
    return [
        *out,
        Row("compile", name, median(rates), "plans/s", min(rates), max(rates), GOAL, "per core"),
    ]


def score(case: Case) -> tuple[list[float], int]:
    """Return the CPU seconds of each stage, and the plan's instructions."""
    gc.collect()
    marks = [time.process_time()]
    with no_garbage_collection():
        found = compile_program(case.program, case.strategy, global_batch=case.global_batch)
        prepared = found.prepared
        marks.append(time.process_time())
        model = DeviceModel(found.plan, case.cluster, None)
        durations = seconds_of(model, found.plan)
        marks.append(time.process_time())
        step_and_period(prepared, durations, latency=found.plan.hop, issue=model.issue_s)
        marks.append(time.process_time())
    return [after - before for before, after in pairwise(marks)], len(prepared)
