"""Confirm the best candidates with runs, by a function that the caller passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from piper_autotune.searching.search import StrategySearch
from piper_compiler import Strategy
from piper_ir.ground.errors import PiperError
from piper_ir.study.study import Row


@dataclass(frozen=True)
class Confirmation:
    """Hold the result of a run of a strategy.

    Attributes:
        period_s: seconds per step in steady state.
        peak_bytes: most bytes alive on a rank; None when they were not measured.
    """

    period_s: float
    peak_bytes: int | None = None


def confirm_best(
    search: StrategySearch, count: int, measure: Callable[[Strategy], Confirmation]
) -> None:
    """Run the best candidates; candidates with equal predictions are one plan and run once."""
    seen: set[tuple[object, ...]] = set()
    for row in search.complete():
        prediction = (row.period_s, row.step_s, row.peak_bytes)
        if prediction in seen:
            continue
        if len(seen) == count:
            return
        seen.add(prediction)
        search.rows[row.number] = _confirmed(row, search.strategies[row.number], measure)


def _confirmed(row: Row, strategy: Strategy, measure: Callable[[Strategy], Confirmation]) -> Row:
    try:
        confirmation = measure(strategy)
    except PiperError as e:
        return replace(row, state="rejected", kind="confirmation", reason=f"running it failed: {e}")
    assert row.period_s is not None, "a complete row has a period"
    error = row.period_s / confirmation.period_s - 1
    return replace(
        row,
        measured_period_s=confirmation.period_s,
        measured_peak_bytes=confirmation.peak_bytes,
        error=error,
    )
