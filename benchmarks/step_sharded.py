"""Compare shared states with FSDP2: step time in interleaved pairs, and the peak of memory.

Processes, model and data are those of `benchmarks.step_time`, in float32 over gloo. FSDP2 drops parameters after every
forward and gathers them again; after a backward under a pipeline it keeps them, and gradients whole, until the step
ends. So ours has two settings: "step" keeps both for the step; with 0 a step holds least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import piper
from benchmarks.measure import Goal, Row, median_interval
from benchmarks.step_kinds import SHARDED
from benchmarks.step_model import LARGE, SMALL, Regime, job
from benchmarks.step_sides import Setup
from benchmarks.step_time import run, shipped_code
from piper_ir.plan.plan_bytes import flat_bytes

PAIRS, QUICK_PAIRS = 30, 4
TIME_GOAL, PEAK_GOAL = Goal("above", 0.98), Goal("below", 0.7)
DEEP = replace(
    SMALL, name="32 layers of 3 MiB", width=256, layers=32, context=16, rows=1, heads=4, steps=1
)
"""Parameters, and not activations, are most of what it holds."""
SHALLOW = replace(DEEP, name="16 layers of 3 MiB", layers=16)
"""The layers that are whole for a moment are more of what this one holds."""


def rows(quick: bool) -> Iterator[Row]:
    """Return both kinds: times in one regime, peaks in another."""
    for kind in SHARDED:
        for resident in (0, "step"):
            yield from timed(kind, LARGE, resident, QUICK_PAIRS if quick else PAIRS)
        yield from peaks(kind, DEEP)
        if SHARDED[kind].stages > 1:
            for buckets in (1, 2):
                yield peak(kind, SHALLOW, 0, buckets)


def prepared(kind: str, regime: Regime, resident: float | str, buckets: int = 1) -> Setup:
    """Return the comparison of a kind, with a plan that keeps so much, and about so many buckets to a layer."""
    sharded = SHARDED[kind]
    microbatches = regime.microbatches if sharded.stages > 1 else 1
    work = job(regime, regime.rows * microbatches * 2)
    layer = 12 * regime.width**2 * 4 / 2**20
    replicas = piper.recipes.data_parallel(
        zero=3, bucket_mb=layer / buckets, resident_mb=resident, reduced_mb=resident
    )
    pipeline = (
        piper.recipes.one_f_one_b(pp=sharded.stages, microbatches=microbatches)
        if sharded.stages > 1
        else ()
    )
    strategy = piper.Strategy(piper.Mesh(pp=sharded.stages, dp=2), (*pipeline, *replicas))
    compiled = piper.compile(work, strategy)
    return Setup(kind, regime, compiled.plan, shipped_code(compiled))


def timed(kind: str, regime: Regime, resident: float | str, pairs: int) -> list[Row]:
    """Return the ratio of step times, and that of CPU time."""
    measured = run(prepared(kind, regime, resident), pairs)
    sides = [[m.ours for m in measured], [m.theirs for m in measured]]
    ours, torchs = (
        [max(t.wall_s for t in pair) for pair in zip(*side, strict=True)] for side in sides
    )
    cpu, cpu_torch = (
        [sum(t.cpu_s for t in pair) for pair in zip(*side, strict=True)] for side in sides
    )
    title = f"{kind} {SHARDED[kind].mesh}, {regime.name}, resident_mb={resident}"
    note = (
        f"{pairs} interleaved pairs; median and its 95 % interval, whose lower end the goal is "
        f"for; "
        f"ours {median(ours) * 1e3:.1f} ms/step, torch {median(torchs) * 1e3:.1f}"
    )
    ratio, low, high = median_interval([t / o for t, o in zip(torchs, ours, strict=True)])
    of_cpu, cpu_low, cpu_high = median_interval(
        [t / o for t, o in zip(cpu_torch, cpu, strict=True)]
    )
    return [
        Row(
            "sharded",
            f"{title}: torch/ours",
            ratio,
            "ratio",
            low,
            high,
            TIME_GOAL,
            note,
            judged=low,
        ),
        Row(
            "sharded",
            f"{title}: CPU time, torch/ours",
            of_cpu,
            "ratio",
            cpu_low,
            cpu_high,
            note="all ranks together",
        ),
    ]


def peaks(kind: str, regime: Regime) -> list[Row]:
    """Return the peaks at both settings."""
    return [peak(kind, regime, resident) for resident in (0, "step")]


def peak(kind: str, regime: Regime, resident: float | str, buckets: int = 1) -> Row:
    """Return the peak of the fullest rank over torch's; memory needs no repetition."""
    setup = prepared(kind, regime, resident, buckets)
    measured = run(setup, 0)
    ours, torchs = max(m.peak_ours for m in measured), max(m.peak_theirs for m in measured)
    shards = max(sum(2 * sum(flat_bytes(b, setup.plan.mesh).values()) for b in setup.plan.buckets if r.role in b.roles)
                 for r in setup.plan.roles)  # fmt: skip
    note = (
        f"ours {ours / 2**20:.1f} MiB, torch {torchs / 2**20:.1f}; parts of states "
        f"{shards / 2**20:.1f}"
    )
    goal = PEAK_GOAL if resident == 0 and SHARDED[kind].stages > 1 else None
    cut = "" if buckets == 1 else f", {buckets} buckets to a layer"
    title = (
        f"{kind} {SHARDED[kind].mesh}, {regime.name}, resident_mb={resident}{cut}: peak, ours/torch"
    )
    return Row("sharded", title, ours / torchs, "ratio", goal=goal, note=note)
