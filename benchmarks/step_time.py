"""Compare step times with torch.distributed: its pipeline schedules (pp=2), and DistributedDataParallel (dp=2).

Pipelines have one or two stages per rank. Model, data, loss, optimizer and processes are the same, one thread each,
with gloo over loopback. Two processes hold both sides; timed runs of the two alternate, and which one goes first
alternates too. The result is the median of torch/ours over the pairs with its 95 % interval: above 1 a plan is faster
than torch. Beside it stands the same ratio of CPU time, which other processes hardly change.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import mean, median
from typing import Any

import piper
from benchmarks.measure import Goal, Row, median_interval
from benchmarks.step_kinds import KINDS, PIPELINES, WORLD
from benchmarks.step_model import LARGE, SMALL, Regime, job
from benchmarks.step_profile import Profile
from benchmarks.step_sides import Setup
from benchmarks.step_worker import ALIVE, SILENCE_S, Measured, work
from piper.api.compiling.compiling import Compiled
from piper_runtime.rank import ShippedCode

PAIRS, QUICK_PAIRS = 40, 6
DATA_PARALLEL = 4
"""So many times as many pairs are run.

A step is one microbatch there, so a run is soon over and any disturbance is a large part of it.
"""
GOAL = Goal("above", 0.98)


def rows(quick: bool) -> Iterator[Row]:
    """Return every comparison in both regimes."""
    for regime in (LARGE, SMALL):
        for kind in KINDS:
            more = 1 if quick or kind in PIPELINES else DATA_PARALLEL
            yield from compared(kind, regime, more * (QUICK_PAIRS if quick else PAIRS))


def compared(kind: str, regime: Regime, pairs: int) -> list[Row]:
    """Compare once: the ratio, both step times, the ratio of CPU time, and what the profiles say of the difference."""
    measured = run(prepared(kind, regime), pairs)
    ours, torchs = [m.ours for m in measured], [m.theirs for m in measured]
    slower = [
        [max(t.wall_s for t in run) for run in zip(*side, strict=True)] for side in (ours, torchs)
    ]
    together = [
        [sum(t.cpu_s for t in run) for run in zip(*side, strict=True)] for side in (ours, torchs)
    ]
    title = f"{kind} {'pp' if kind in PIPELINES else 'dp'}=2, {regime.name}"
    forward = median(s for m in measured for s in m.forward_s)
    note = (
        f"{pairs} interleaved pairs of {regime.steps}-step runs; median and its 95 % interval, "
        f"whose lower end the "
        f"goal is for; "
        f"F of ours {forward * 1e3:.1f} ms"
    )
    ratio, low, high = _ratio(*slower)
    cpu, cpu_low, cpu_high = _ratio(*together)
    used = (
        f"both ranks together; {median(together[0]) * 1e3:.1f} ms/step of ours, "
        f"{median(together[1]) * 1e3:.1f} of torch"
    )
    return [
        Row("step", f"{title}: torch/ours", ratio, "ratio", low, high, GOAL, note, judged=low),
        _time_row(f"{title}: ours", slower[0]),
        _time_row(f"{title}: torch", slower[1]),
        Row("step", f"{title}: CPU time, torch/ours", cpu, "ratio", cpu_low, cpu_high, note=used),
        *profile_rows(
            "step", title, [m.profile_ours for m in measured], [m.profile_theirs for m in measured]
        ),
    ]


def _ratio(ours: Sequence[float], torchs: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of torch/ours over the pairs, with its interval."""
    return median_interval([t / o for t, o in zip(torchs, ours, strict=True)])


def _time_row(name: str, seconds: Sequence[float]) -> Row:
    ordered = sorted(s * 1e3 for s in seconds)
    tenth = len(ordered) // 10
    return Row(
        "step",
        name,
        median(ordered),
        "ms/step",
        ordered[tenth],
        ordered[-1 - tenth],
        note="1st and 9th decile",
    )


def profile_rows(
    section: str, title: str, ours: Sequence[Profile], torchs: Sequence[Profile]
) -> list[Row]:
    """Return for each category the mean over the ranks, largest difference first."""
    found: list[tuple[str, float, float]] = []
    for category in sorted({c for p in (*ours, *torchs) for c in p}):
        here, there = (mean(p.get(category, 0.0) for p in side) * 1e3 for side in (ours, torchs))
        found.append((category, here, there))
    found.sort(key=lambda f: -abs(f[1] - f[2]))
    return [
        Row(
            section,
            f"{title}: profile, {name}",
            here,
            "ms/step",
            note=f"torch {there:.2f}; ours - torch {here - there:+.2f}",
        )
        for name, here, there in found
    ]


def prepared(kind: str, regime: Regime) -> Setup:
    """Return the comparison with its plan and code, compiled as a user would."""
    if kind in PIPELINES:
        work, mesh = job(regime, regime.rows * regime.microbatches), piper.Mesh(pp=WORLD)
        recipe = PIPELINES[kind].recipe(pp=WORLD, microbatches=regime.microbatches)
    else:
        work, mesh = job(regime, WORLD * regime.rows), piper.Mesh(dp=WORLD)
        recipe = piper.recipes.data_parallel(over=("dp",))
    compiled = piper.compile(work, piper.Strategy(mesh, recipe))
    return Setup(kind, regime, compiled.plan, shipped_code(compiled))


def shipped_code(compiled: Compiled) -> Mapping[str, Mapping[str, ShippedCode]]:
    """Return the code of a plan, as workers get it."""
    assert compiled.code is not None
    code = compiled.code.export([c.code for c in compiled.plan.chunks], compiled.plan.rows)
    return {
        name: {step: ShippedCode(c.source, dict(c.constants)) for step, c in steps.items()}
        for name, steps in code.items()
    }


def run(setup: Setup, pairs: int) -> list[Measured]:
    """Start the processes and collect what they measure; RuntimeError with the traceback of one that fails."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="piper-bench-") as folder:
        pipes: list[Connection[Any, Any]] = []
        processes = []
        try:
            for rank in range(setup.plan.mesh.world):
                ours, its = context.Pipe(duplex=False)
                process = context.Process(
                    target=work,
                    args=(setup, rank, str(Path(folder, "store")), pairs, its),
                    daemon=True,
                )
                process.start()
                its.close()
                pipes.append(ours)
                processes.append(process)
            return collected(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def collected(pipes: Sequence[Connection[Any, Any]]) -> list[Measured]:
    """Return what the processes send, by rank.

    RuntimeError for one that fails or ends, and when none gets further for too long.
    """
    found: dict[int, Measured] = {}
    while missing := [rank for rank in range(len(pipes)) if rank not in found]:
        ready = wait([pipes[rank] for rank in missing], SILENCE_S)
        if not ready:
            raise RuntimeError(
                f"no rank got further within {SILENCE_S:.0f} s; where they stand is above"
            )
        for rank in missing:
            if pipes[rank] in ready and (answer := _received(rank, pipes[rank])) is not None:
                found[rank] = answer
    return [found[rank] for rank in range(len(pipes))]


def _received(rank: int, pipe: Connection[Any, Any]) -> Measured | None:
    """Return what a process sends next; None for a sign of life."""
    try:
        answer = pipe.recv()
    except EOFError:
        raise RuntimeError(
            f"the process of rank {rank} ended without an answer; its output is above"
        ) from None
    if answer == ALIVE:
        return None
    if not isinstance(answer, Measured):
        raise RuntimeError(f"rank {rank} failed:\n{answer}")
    return answer
