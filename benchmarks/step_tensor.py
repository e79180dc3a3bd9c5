"""Compare tensor and sequence parallelism with torch's `parallelize_module`: step time in interleaved pairs, tp=2.

Processes and data are those of `benchmarks.step_time`, in float32 over gloo. Both sides have embedding and head whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import piper
from benchmarks.measure import Goal, Row, median_interval
from benchmarks.step_kinds import WORLD
from benchmarks.step_model import Regime
from benchmarks.step_sides import Setup
from benchmarks.step_time import profile_rows, run, shipped_code
from benchmarks.tensor_model import REGIMES, TENSOR, tensor_job

PAIRS, QUICK_PAIRS = 60, 6
GOAL = Goal("above", 0.98)


def rows(quick: bool) -> Iterator[Row]:
    """Return every comparison in both regimes."""
    for regime in REGIMES:
        for name in TENSOR:
            yield from compared(name, regime, QUICK_PAIRS if quick else PAIRS)


def prepared(name: str, regime: Regime) -> Setup:
    """Return the comparison with its plan and code, compiled as a user would."""
    work = tensor_job(name, regime, regime.rows)
    strategy = piper.Strategy(
        piper.Mesh(tp=WORLD), [piper.shard(piper.where(), stream=TENSOR[name].stream, keep=True)]
    )
    compiled = piper.compile(work, strategy)
    return Setup(name, regime, compiled.plan, shipped_code(compiled), tolerance=1e-5)


def compared(name: str, regime: Regime, pairs: int) -> list[Row]:
    """Return the ratio of step times and that of CPU time, and what the profiles say of the difference."""
    measured = run(prepared(name, regime), pairs)
    sides = [[m.ours for m in measured], [m.theirs for m in measured]]
    ours, torchs = (
        [max(t.wall_s for t in pair) for pair in zip(*side, strict=True)] for side in sides
    )
    cpu, cpu_torch = (
        [sum(t.cpu_s for t in pair) for pair in zip(*side, strict=True)] for side in sides
    )
    ratio, low, high = median_interval([t / o for t, o in zip(torchs, ours, strict=True)])
    of_cpu, cpu_low, cpu_high = median_interval(
        [t / o for t, o in zip(cpu_torch, cpu, strict=True)]
    )
    title = f"{name} tp={WORLD}, {regime.name}"
    note = (
        f"{pairs} interleaved pairs of {regime.steps}-step runs; median and its 95 % interval, "
        f"whose lower end the "
        f"goal is for; "
        f"ours {median(ours) * 1e3:.2f} ms/step, torch {median(torchs) * 1e3:.2f}"
    )
    used = f"both ranks; ours {median(cpu) * 1e3:.2f} ms/step, torch {median(cpu_torch) * 1e3:.2f}"
    return [
        Row("tensor", f"{title}: torch/ours", ratio, "ratio", low, high, GOAL, note, judged=low),
        Row(
            "tensor",
            f"{title}: CPU time, torch/ours",
            of_cpu,
            "ratio",
            cpu_low,
            cpu_high,
            note=used,
        ),
        *profile_rows(
            "tensor",
            title,
            [m.profile_ours for m in measured],
            [m.profile_theirs for m in measured],
        ),
    ]
