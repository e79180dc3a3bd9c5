"""How long a step takes when durations vary, as a table."""

from __future__ import annotations

from piper_ir.tools import time_text
from piper_report import FIRST_STEP, Table
from piper_simulator import Distribution


def distribution_table(found: Distribution) -> Table:
    """Percentiles of the step."""
    rows = []
    for name, of in ((FIRST_STEP, found.step_s), ("step in steady state", found.period_s)):
        rows.append((name, *map(time_text, (of.p5, of.median, of.p95, of.mean, of.std))))
    drew = f"{found.repetitions} repetitions, seed {found.seed}; {found.ranks} of {found.world} ranks drew durations of their own"
    notes = (f"{drew}, each held as it lasts in the first step", *([f"warning: {found.note}"] if found.note else []))
    columns = ("", "5 %", "median", "95 %", "mean", "standard deviation")
    return Table(f"durations that vary by {found.jitter:g} (lognormal)", columns, tuple(rows), notes)
