"""Show predictions of published runs: rows, scores by source, the parts of a step, and fitted constants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from piper.published.fitting import Fit
from piper.published.scoring import RunPrediction, Scores, SourceScore
from piper.published.table import GB, PublishedRow
from piper_ir.tools import count_text, time_text
from piper_report import Table, percent
from piper_simulator import StepParts


def prediction_table(predictions: Sequence[RunPrediction], warned: Sequence[str]) -> Table:
    """Return a table of the rows, with refused ones and warnings at the end as notes."""
    rows = tuple(_row(p) for p in predictions if not p.refused)
    notes = tuple(f"{p.row.case}: {p.refused}" for p in predictions if p.refused)
    if decimal := sum(p.row.peak_unit == GB for p in predictions):
        notes += (f"peaks of {count_text(decimal, 'row')} are in decimal GB, as their notes say",)
    for note, n in Counter(note for p in predictions for note in p.notes).items():
        notes += (f"{count_text(n, 'row')}: {note}",)
    columns = (
        "case",
        "stack",
        "measured",
        "predicted",
        "80 % inside",
        "error",
        "peak GiB",
        "allocated",
        "reserved",
    )
    return Table("Published runs", columns, rows, (*notes, *warned))


def _row(p: RunPrediction) -> tuple[str, ...]:
    ends = sorted({time_text(min(p.seconds)), time_text(max(p.seconds))}, key=len)
    shown = (
        time_text(min(p.seconds))
        if len(ends) == 1
        else " to ".join((time_text(min(p.seconds)), time_text(max(p.seconds))))
    )
    return (
        p.row.case,
        p.stack or "-",
        "-" if p.row.step_s is None else time_text(p.row.step_s),
        shown,
        f"{time_text(p.low)} to {time_text(p.high)}",
        _signed(p.error),
        "-" if p.row.peak_gib is None else f"{p.row.peak_gib:g}",
        f"{p.peak_gib:.2f}",
        f"{p.reserved_gib:.2f}",
    )


def score_table(found: Scores) -> Table:
    """Return a table of scores by source."""
    columns = (
        "source", "n", "refused", "mean", "signed", "p90", "max", "tau", "memory", "max", "covered",
    )  # fmt: skip
    rows = tuple(_scored(s) for s in found.sources)
    notes = (
        f"macro mean of the sources that count: {percent(found.macro)}",
        f"{found.refused} of {count_text(len(found.predictions), 'row')} refused, which no mean counts",
        "errors are predicted / measured - 1; of a range, that of its middle; tau over pairs more than 3 % apart",
    )
    return Table("Scores", columns, rows, notes)


def _scored(s: SourceScore) -> tuple[str, ...]:
    return (
        s.name,
        str(s.n),
        str(s.refused),
        percent(s.mean),
        _signed(s.signed),
        percent(s.p90),
        percent(s.most),
        "-" if s.tau is None else f"{s.tau:.2f}",
        percent(s.memory_mean),
        percent(s.memory_most),
        percent(s.coverage),
    )


def why_table(
    row: PublishedRow, cluster: str, parts: StepParts, changes: Mapping[str, float], said: str
) -> Table:
    """Return a table of the parts of a step on the role that computes the longest, and of derivatives.

    `said` has the values that open fields of the row have here; "" if none is open.
    """
    seconds = [*parts.kernels.items(), *parts.inside.items()]
    seconds += [("updates and others", parts.others), ("waiting, messages between", parts.waiting)]
    rows = [(name, time_text(s), percent(s / parts.period)) for name, s in seconds if s > 0]
    measured = "" if row.step_s is None else f", measured {time_text(row.step_s)}"
    notes = tuple(
        f"d log step / d {'' if name == 'hidden' else 'log '}{name} = {value:+.3f}"
        for name, value in changes.items()
    )
    if said:
        notes = (f"of the readings of a row with open fields that with {said}", *notes)
    title = f"{row.case} on {cluster}, {parts.role}: {time_text(parts.period)}{measured}"
    return Table(title, ("", "time", "share"), tuple(rows), notes)


DECIDED = 0.75
"""The share of a fitted constant's value from which on runs decide it."""
UNDECIDED = (
    f"by less than {100 * DECIDED:.0f} % decided by the runs, the rest by the prior, since the steps change little with "
    f"it, or as much as with another one; runs with other layouts tell more"
)


def fit_table(found: Fit, file: str, left_out: Sequence[str]) -> Table:
    """Return a table of the constants of a fitted stack, with notes on the runs that were left out."""
    rows = tuple(
        (
            name,
            f"{c.value:.4g}",
            f"{c.prior:g}",
            f"{c.low:g} to {c.high:g}",
            "AT ITS BOUND" if c.at_bound else "fitted" if c.fitted else "prior",
            percent(found.by_runs[name]) if name in found.by_runs else "-",
        )
        for name, c in found.stack.constants.items()
    )
    unknown = [name for name, share in found.by_runs.items() if share < DECIDED]
    notes = (
        f"{count_text(len(found.rows), 'run')}: mean error {percent(found.before)} before, {percent(found.after)} after",
        *left_out,
        *([f"{', '.join(unknown)}: {UNDECIDED}"] if unknown else []),
        f"written: {file}",
    )
    columns = ("", "value", "prior", "range", "", "by runs")
    return Table(f"Constants of {found.stack.name}", columns, rows, notes)


def _signed(share: float | None) -> str:
    return "-" if share is None else f"{share:+.1%}"
