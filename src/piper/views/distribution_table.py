"""Show as a table how long a step takes when durations vary."""

from __future__ import annotations

from piper_ir.tools import time_text
from piper_report import FIRST_STEP, Table
from piper_simulator import Distribution


def distribution_table(distribution: Distribution) -> Table:
    """Return the percentiles of the step as a table."""
    rows = []
    for name, percentiles in (
        (FIRST_STEP, distribution.step_s),
        ("step in steady state", distribution.period_s),
    ):
        rows.append(
            (
                name,
                *map(
                    time_text,
                    (
                        percentiles.p5,
                        percentiles.median,
                        percentiles.p95,
                        percentiles.mean,
                        percentiles.std,
                    ),
                ),
            )
        )
    drew = (
        f"{distribution.repetitions} repetitions, seed {distribution.seed}; "
        f"{distribution.ranks} of {distribution.world} ranks drew durations of their own"
    )
    notes = (
        f"{drew}, each held as it lasts in the first step",
        *([f"warning: {distribution.note}"] if distribution.note else []),
    )
    columns = ("", "5 %", "median", "95 %", "mean", "standard deviation")
    return Table(
        f"durations that vary by {distribution.jitter:g} (lognormal)", columns, tuple(rows), notes
    )
