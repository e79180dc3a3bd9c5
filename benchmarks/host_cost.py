"""Measure host microseconds per executed instruction, on plans whose chunks compute nothing (`benchmarks.noop`)."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median

import torch

from benchmarks import noop
from benchmarks.measure import Goal, Row
from piper_ir.plan.plan import COMPUTE, Plan
from piper_runtime.engine import HEART_SLOTS, CpuStreams, Engine, Posted
from piper_runtime.launch import Pool, execute, rank_job
from piper_runtime.rank import BoundComm, Rank, Thunk, materialize

LAYERS, MICROBATCHES = 32, 16
"""Layers and microbatches of the plan without communication.

With it, a stage is one layer: as many transfers per computation as there can be.
"""
PIPELINE_MICROBATCHES = 64
ALONE_GOAL, COMM_GOAL, SPLIT_GOAL = Goal("below", 3.0), Goal("below", 20.0), Goal("below", 1.1)
CASES = (
    ("issue loop, no communication", 1, LAYERS, MICROBATCHES, 0),
    ("with communication, first of 2 stages", 2, 2, PIPELINE_MICROBATCHES, 0),
    ("with communication, second of 4 stages", 4, 4, PIPELINE_MICROBATCHES, 1),
)
"""Title, devices, layers, microbatches, and the rank that is measured."""
UNIT = "us/instr"


def rows(quick: bool) -> list[Row]:
    """Return rows without communication, with streams that send nothing, with split backward, and of processes.

    There are 2 and 4 communication streams.
    """
    steps = 20 if quick else 200
    torch.set_num_threads(1)
    return [
        *(_row(title, noop.plan(*sizes), rank, steps) for title, *sizes, rank in CASES),
        *(
            _split_row(title, noop.plan(*sizes), noop.plan(*sizes, split=True), rank, steps)
            for title, *sizes, rank in CASES
        ),
        _gloo_row(noop.plan(2, 2, PIPELINE_MICROBATCHES), steps),
    ]


def _row(name: str, plan: Plan, rank: int, steps: int) -> Row:
    count = len(plan.role_of(rank).program)
    (wall, cpu), *_ = lone_steps([plan], rank, steps)
    per_instr = [s / count * 1e6 for s in wall]
    busy = median(cpu) / count * 1e6
    note = (
        f"{_described(plan, rank)}; median of {steps} steps with 1st and 9th decile; CPU time "
        f"{busy:.1f}; transfers do nothing"
    )
    goal = ALONE_GOAL if plan.mesh.world == 1 else COMM_GOAL
    return Row("host", name, median(per_instr), UNIT, *_deciles(per_instr), goal, note)


def _split_row(name: str, plain: Plan, split: Plan, rank: int, steps: int) -> Row:
    """Compare CPU time per instruction with and without split backward; steps of the two alternate."""
    (_, cpu), (_, cpu_split) = lone_steps([plain, split], rank, steps)
    each, each_split = (
        median(s) / len(p.role_of(rank).program) * 1e6
        for s, p in ((cpu, plain), (cpu_split, split))
    )
    note = (
        f"{_described(split, rank)}; CPU time per instruction {each_split:.2f} us, unsplit "
        f"{each:.2f}"
    )
    return Row(
        "host", f"split backward, {name}", each_split / each, "x", goal=SPLIT_GOAL, note=note
    )


def lone_steps(
    plans: Sequence[Plan], rank: int, steps: int
) -> list[tuple[list[float], list[float]]]:
    """Return for each plan the seconds of each step of one rank by itself, by the clock and of CPU time.

    CPU time leaves out what else runs. The plans take turns. Streams are the real ones; a communication has ended when
    it is posted.
    """
    with ExitStack() as stack:
        engines = [_engine(plan, rank, stack) for plan in plans]
        out: list[tuple[list[float], list[float]]] = [([], []) for _ in plans]
        for step in range(steps + 1):
            for engine, (wall, cpu) in zip(engines, out, strict=True):
                begin, begin_cpu = time.perf_counter(), time.process_time()
                engine.step(step)
                wall.append(time.perf_counter() - begin)
                cpu.append(time.process_time() - begin_cpu)
    return [(wall[1:], cpu[1:]) for wall, cpu in out]


def _engine(plan: Plan, rank: int, stack: ExitStack) -> Engine:
    job = noop.job(plan)
    initial = materialize(job)
    bound = Rank(plan, rank, noop.CODE, rank_job(job), initial.params, initial.buffers)
    heart = array("q", [0] * HEART_SLOTS)
    backend = CpuStreams(plan.role_of(rank).streams, heart)
    stack.callback(backend.close)
    return Engine(bound, backend, _silent, heart)


def _silent(comm: BoundComm) -> Thunk:
    operand = comm.operand
    return Posted(lambda: partial(void, operand()))


def void(_: object) -> None:
    """Drop a result."""


def _gloo_row(plan: Plan, steps: int) -> Row:
    job = noop.job(plan)
    with Pool(plan.mesh.world) as pool:
        run = execute(plan, noop.CODE, job, steps=steps + 1, launcher="processes", pool=pool)
    count = max(len(r.program) for r in plan.roles)
    per_instr = [s / count * 1e6 for s in run.step_s[1:]]
    note = f"{_described(plan, 0)}; wall time of the slower rank: gloo and waiting for each other"
    return Row(
        "host", "2 processes over gloo", median(per_instr), UNIT, *_deciles(per_instr), None, note
    )


def _described(plan: Plan, rank: int) -> str:
    streams = Counter(i.stream for i in plan.role_of(rank).program)
    elsewhere = sum(n for s, n in streams.items() if s != COMPUTE)
    return (
        f"{sum(streams.values())} instructions, {elsewhere} of them on {len(streams) - 1} "
        f"communication streams"
    )


def _deciles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
