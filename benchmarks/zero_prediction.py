"""Compare predictions of ZeRO and recomputation with measurements, from profiles of 1F1B that has neither.

It is `benchmarks.prediction` with other strategies. Where there is a core per rank, some are on four ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import piper
from benchmarks.measure import Goal, Row
from benchmarks.prediction import GLOBAL_BATCH, QUICK_ROUNDS, QUICK_STRATEGIES, predicted
from benchmarks.step_model import LARGE
from piper_ir.tools import usable_cores

SECTION = "zero"
ROUNDS = 5
GOALS = {
    "step time: order": Goal("above", 0.85),
    "peak memory: largest error": Goal("below", 0.005),
}
"""The goals that are higher than those of `benchmarks.prediction`."""
DATA: tuple[tuple[int, int, str, dict[str, Any]], ...] = (
    (2, 1, "all", {}),
    (4, 1, "inputs", {}),
    (4, 2, "all", {}),
    (2, 2, "all", {"reduced_mb": "step"}),
    (4, 2, "products", {}),
    (4, 3, "all", {}),
    (2, 3, "inputs", {}),
    (2, 3, "all", {"resident_mb": "step", "reduced_mb": "step"}),
    (8, 3, "products", {"resident_mb": "step"}),
)
"""Microbatches, the level of ZeRO, the policy of recomputation, and windows, on two replicas."""
PIPES = ((4, "inputs", False), (8, "products", False), (4, "inputs", True))
"""Microbatches, the policy of recomputation, and whether it is a node of its own, on two stages."""
BOTH = ((4, 1, "all"), (4, 2, "inputs"), (4, 3, "all"))
"""Microbatches, the level of ZeRO and the policy, on two stages of two replicas."""


def rows(quick: bool) -> Iterator[Row]:
    """Yield a row per strategy, then the goals."""
    chosen = strategies()
    names = [*chosen][:: max(1, len(chosen) // QUICK_STRATEGIES)] if quick else [*chosen]
    for row in predicted(
        {n: chosen[n] for n in names}, LARGE, GLOBAL_BATCH, QUICK_ROUNDS if quick else ROUNDS
    ):
        yield replace(row, section=SECTION, goal=GOALS.get(row.name, row.goal))


def strategies() -> dict[str, piper.Strategy]:
    """Return ZeRO on two replicas and recomputation on two stages, and both on four ranks where there are cores."""
    found = {}
    for m, zero, keep, windows in DATA:
        name = (
            f"dp=2 zero={zero} "
            f"m={m}{_kept(keep)}{''.join(f', {k}={v!r}' for k, v in windows.items())}"
        )
        split = piper.split(piper.where(), microbatches=m)
        found[name] = piper.Strategy(
            piper.Mesh(dp=2),
            (split, *piper.recipes.data_parallel(zero=zero, **windows), *_again(keep)),
        )
    for m, keep, apart in PIPES:
        pipe = (*piper.recipes.one_f_one_b(pp=2, microbatches=m), *_again(keep, apart))
        found[f"1f1b pp=2 m={m}{_kept(keep)}{', apart' if apart else ''}"] = piper.Strategy(
            piper.Mesh(pp=2), pipe
        )
    if usable_cores() >= 4:
        for m, zero, keep in BOTH:
            both = (
                *piper.recipes.one_f_one_b(pp=2, microbatches=m),
                *piper.recipes.data_parallel(zero=zero),
                *_again(keep),
            )
            found[f"1f1b pp=2 dp=2 zero={zero} m={m}{_kept(keep)}"] = piper.Strategy(
                piper.Mesh(pp=2, dp=2), both
            )
    return found


def _kept(keep: str) -> str:
    return "" if keep == "all" else f" keep={keep}"


def _again(keep: str, apart: bool = False) -> tuple[piper.recompute, ...]:
    return () if keep == "all" else (piper.recompute(piper.where(), keep=keep, apart=apart),)
