"""Make the tables of a search: confirmed candidates, rejected candidates, and all trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from piper_ir.study.study import Row, objective_of
from piper_ir.study.study_groups import folded, folded_text
from piper_ir.tools import size_text, time_text
from piper_report.facts.results import Results
from piper_report.facts.summary import (
    ABSENT,
)
from piper_report.figures.tuning_figures import goal_of, held
from piper_report.tables.tables import MOST_NOTES, Column, Sheet, error_of, sheet, signed_percent


def trial_text(trial: Row) -> str:
    """Return the parameters of a trial as text."""
    return params_text(trial.params) or ABSENT


def params_text(params: Mapping[str, Any]) -> str:
    """Return names and values as text, numbers with four digits."""
    return ", ".join(
        f"{name}={format(value, '.4g') if isinstance(value, float) else value}"
        for name, value in params.items()
    )


def tuning_sheets(results: Results) -> list[Sheet]:
    """Return confirmed candidates, reasons of the rejected ones, the rules, and all trials, each if it has rows."""
    if results.study is None:
        return []
    trials = results.study.trials
    rules = sheet(
        "rules",
        "Rules that reject before compiling",
        [Column("rule", "rule")],
        [(r,) for r in results.study.rules],
    )
    return [
        s for s in (_confirmed(trials), _rejected(trials), rules, _trials(results)) if len(s.frame)
    ]


def _confirmed(trials: Sequence[Row]) -> Sheet:
    done = [t for t in trials if t.measured_period_s is not None]
    columns = [Column("trial", "trial"), Column("params", "parameters"), Column("period_s", "period, predicted", time_text),
               Column("measured_period_s", "period, measured", time_text), Column("error", "error", signed_percent),
               Column("peak_bytes", "peak, predicted", size_text), Column("measured_peak_bytes", "peak, measured", size_text),
               Column("peak_error", "error", signed_percent)]  # fmt: skip
    rows = [
        (t.number, trial_text(t), t.period_s, t.measured_period_s, error_of(t.period_s, t.measured_period_s), t.peak_bytes,
         t.measured_peak_bytes, error_of(t.peak_bytes, t.measured_peak_bytes))
        for t in sorted(done, key=lambda t: t.measured_period_s or 0.0)
    ]  # fmt: skip
    return sheet("confirmed", "Confirmed on hardware", columns, rows)


def _rejected(trials: Sequence[Row]) -> Sheet:
    by_kind: dict[str, list[Row]] = {}
    for t in trials:
        if t.state == "rejected":
            by_kind.setdefault(t.kind or "other", []).append(t)
    columns = [Column("reason", "reason"), Column("count", "candidates"), Column("trial", "for example, trial"),
               Column("params", "with"), Column("example", "was told")]  # fmt: skip
    rows = [
        (kind, len(some), some[0].number, trial_text(some[0]), some[0].reason)
        for kind, some in sorted(by_kind.items(), key=lambda x: (-len(x[1]), x[0]))
    ]
    return sheet("rejected", "Rejected candidates by reason", columns, rows)


def _trials(results: Results) -> Sheet:
    """Return all candidates, the best first, the rejected last."""
    assert results.study is not None
    columns = [Column("trial", "trial"), Column("state", "state"), Column("params", "parameters"),
               Column("period_s", "period", time_text), Column("memory_bytes", "memory", size_text),
               Column("source", "scored by"), Column("reason", "reason")]  # fmt: skip
    order = sorted(
        results.study.trials, key=lambda t: (t.state == "rejected", objective_of(t), t.number)
    )
    goal, other = goal_of(results.study), results.study.objective != "period"
    columns += [Column("value", goal.name, goal.text)] if other else []
    more = [[t.value] if other else [] for t in order]
    rows = [
        (t.number, t.state, trial_text(t), t.period_s, held(t), t.source, t.reason, *own)
        for t, own in zip(order, more, strict=True)
    ]
    equal = [
        text
        for group in folded([t for t in order if t.state == "complete"])
        if (text := folded_text(group))
    ]
    notes = dict.fromkeys((*equal, *(f"warning: {note}" for t in order for note in t.notes)))
    return sheet("trials", "All candidates", columns, rows, tuple(notes)[:MOST_NOTES])
