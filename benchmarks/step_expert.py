"""Compare expert parallelism with torch's: step time in interleaved pairs, ep=2, of a dropless mixture.

Processes and data are those of `benchmarks.step_time`, in float32 over gloo. Both sides take every token, whatever
experts are chosen: torch's exchanges as many rows as there are, ours rounds of at most 1.25 x the mean, the default.
Each side's ranks are where its launcher has them; rows without a goal have torch's on cores of their own, as ours are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import piper
from benchmarks.expert_model import EXPERTS, REGIMES, MixtureRegime, expert_job
from benchmarks.measure import Goal, Row, median_interval
from benchmarks.step_kinds import WORLD
from benchmarks.step_sides import Setup
from benchmarks.step_time import profile_rows, run, shipped_code
from benchmarks.step_worker import Measured

PAIRS, QUICK_PAIRS = 60, 6
GOAL = Goal("above", 0.98)


def rows(quick: bool) -> Iterator[Row]:
    """Return the comparison in both regimes."""
    for regime in REGIMES:
        yield from compared(regime, QUICK_PAIRS if quick else PAIRS)


def prepared(regime: MixtureRegime, tolerance: float = 1e-5) -> Setup:
    """Return the comparison with its plan and code, compiled as a user would."""
    recipe = (*piper.recipes.expert_parallel(), *piper.recipes.data_parallel(over=("dp", "ep")))
    compiled = piper.compile(
        expert_job(regime, WORLD * regime.rows), piper.Strategy(piper.Mesh(ep=WORLD), recipe)
    )
    return Setup(EXPERTS, regime, compiled.plan, shipped_code(compiled), tolerance)


def compared(regime: MixtureRegime, pairs: int) -> list[Row]:
    """Return the ratio of step times and that of CPU time, and what the profiles say of the difference."""
    measured = run(prepared(regime), pairs)
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
    title = f"dropless mixture ep={WORLD}, {regime.name}"
    note = (
        f"{pairs} interleaved pairs of {regime.steps}-step runs; median and its 95 % interval, "
        f"whose lower end the "
        f"goal is for; "
        f"ours {median(ours) * 1e3:.2f} ms/step, torch {median(torchs) * 1e3:.2f}"
    )
    used = f"both ranks; ours {median(cpu) * 1e3:.2f} ms/step, torch {median(cpu_torch) * 1e3:.2f}"
    return [
        Row("experts", f"{title}: torch/ours", ratio, "ratio", low, high, GOAL, note, judged=low),
        *placed_rows(title, measured, ours),
        Row(
            "experts",
            f"{title}: CPU time, torch/ours",
            of_cpu,
            "ratio",
            cpu_low,
            cpu_high,
            note=used,
        ),
        *profile_rows(
            "experts",
            title,
            [m.profile_ours for m in measured],
            [m.profile_theirs for m in measured],
        ),
    ]


def placed_rows(title: str, measured: Sequence[Measured], ours: Sequence[float]) -> Iterator[Row]:
    """Yield the same ratio with torch's ranks on cores of their own, as ours are, by what their threads do."""
    for way in measured[0].placed:
        seconds = [
            max(t.wall_s for t in pair)
            for pair in zip(*[m.placed[way] for m in measured], strict=True)
        ]
        ratio, low, high = median_interval([t / o for t, o in zip(seconds, ours, strict=True)])
        note = f"torch {median(seconds) * 1e3:.2f} ms/step"
        yield Row(
            "experts",
            f"{title}: torch on our cores, {way}: torch/ours",
            ratio,
            "ratio",
            low,
            high,
            note=note,
        )
