"""Predict published runs and score the predictions.

Errors are predicted / measured - 1. A row with open fields is predicted for each plausible reading; its prediction is
then a range, and its error that of the middle (the geometric mean of the ends).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from statistics import fmean
from typing import Any

from piper.published.table import PublishedRow
from piper_ir.ground.errors import PiperError
from piper_simulator import (
    SOFTWARE,
    RunsInterval,
    Stack,
    held_and_reserved,
    period_and_interval,
)

APART = 0.03
"""The share by which the measured times of a pair of rows differ at least, for Kendall's tau."""
HEADLINE = "measured"
"""The block whose rows count in headline means."""


@dataclass(frozen=True)
class RunPrediction:
    """Hold the prediction of a published run.

    Attributes:
        row: the run.
        seconds: of a step, for each reading of its open fields.
        low: the lower end of the interval of 80 %.
        high: its upper end.
        peak_gib: allocated memory of the fullest rank, the largest of the readings, in units of the row's `peak_unit`.
        reserved_gib: memory that the allocator reserves for it.
        stack: name of the software stack; "" if there is none for the row.
        refused: why the row cannot be predicted; "" if it is.
        notes: the fields that are taken in the nearest form.
    """

    row: PublishedRow
    seconds: tuple[float, ...] = ()
    low: float = math.nan
    high: float = math.nan
    peak_gib: float = math.nan
    reserved_gib: float = math.nan
    stack: str = ""
    refused: str = ""
    notes: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        """Return the middle of the readings; nan if there are none."""
        if not self.seconds:
            return math.nan
        return math.sqrt(min(self.seconds) * max(self.seconds))

    @property
    def error(self) -> float | None:
        """Return the error of the step; None without a prediction or a measurement."""
        if not self.seconds or self.row.step_s is None:
            return None
        return self.step_s / self.row.step_s - 1

    @property
    def memory_error(self) -> float | None:
        """Return the error of the peak, against the published one: reserved where its note says so, else allocated."""
        if not self.seconds or self.row.peak_gib is None:
            return None
        reserved = self.row.says("reserved")
        return (self.reserved_gib if reserved else self.peak_gib) / self.row.peak_gib - 1

    @property
    def covered(self) -> bool | None:
        """Return whether the interval holds the measured step; None without one."""
        if self.error is None or self.row.step_s is None:
            return None
        return self.low <= self.row.step_s <= self.high

    def columns(self) -> dict[str, str]:
        """Return the row with the columns that `piper accuracy --out` adds."""
        known = bool(self.seconds)
        return {
            **self.row.fields,
            "predicted_step_s": f"{self.step_s:.6g}" if known else "",
            "low_step_s": f"{self.low:.6g}" if known else "",
            "high_step_s": f"{self.high:.6g}" if known else "",
            "predicted_peak_gib": f"{self.peak_gib:.5g}" if known else "",
            "predicted_reserved_gib": f"{self.reserved_gib:.5g}" if known else "",
            "stack": self.stack or self.row.stack,
            "refused": self.refused,
        }


def by_model(rows: Sequence[PublishedRow]) -> list[int]:
    """Return the numbers of rows in an order in which rows of one model follow each other, as they share a capture."""
    from piper.published.convert import readings
    from piper.published.run_model import model_of

    def model(row: PublishedRow) -> str:
        try:
            return repr(model_of(next(readings(row)))[0])
        except PiperError:  # `predict` says why
            return ""

    first: dict[str, int] = {}
    keys = list(map(model, rows))
    for key in keys:
        first.setdefault(key, len(first))
    return sorted(range(len(rows)), key=lambda at: first[keys[at]])


def predict(
    published: PublishedRow,
    *,
    stack: Stack | str | None = None,
    memory: bool = True,
) -> RunPrediction:
    """Return the prediction of a row.

    Args:
        published: The row.
        stack: A software stack, or its name, in place of the row's own.
        memory: Whether memory is predicted, too, which takes longer.
    """
    from piper.published.convert import (
        notes_on_fields,
        readings,
    )  # they need torch, and scores do not
    from piper.published.plans import plan_of
    from piper.published.run_cluster import is_guessed

    if published.unread:
        return RunPrediction(published, refused=published.unread)
    found: list[_Reading] = []
    name = ""
    notes: tuple[str, ...] = ()
    try:
        for reading in readings(published):
            run, plan = plan_of(reading, stack)
            cluster = run.cluster
            held, taken = held_and_reserved(plan, cluster) if memory else (0.0, 0.0)
            fits = held <= cluster.device.memory_bytes
            step_s, interval = period_and_interval(plan, cluster)
            found.append(_Reading(step_s, interval, held, taken, fits))
            name = "" if cluster.device.stack is None else cluster.device.stack.name
            notes = run.notes
    except PiperError as error:
        reason = str(error).removeprefix(f"{published.case}: ")  # tables name the case themselves
        return RunPrediction(published, refused=reason)
    if name in SOFTWARE and stack is None and is_guessed(published, cluster.device.name):
        notes += (f"source and note name no software: taken as {name}",)
    possible = [one for one in found if one.fits] or found  # a run that was measured did fit
    intervals = [one.interval for one in possible if one.interval is not None]
    return RunPrediction(
        published,
        tuple(one.step_s for one in possible),
        min((i.low for i in intervals), default=math.nan),
        max((i.high for i in intervals), default=math.nan),
        max(one.held for one in possible) / published.peak_unit,
        max(one.reserved for one in possible) / published.peak_unit,
        name,
        notes=(*notes_on_fields(published), *notes),
    )


@dataclass(frozen=True)
class _Reading:
    """Hold the prediction of a reading: seconds, allocated and reserved bytes, and whether the device has as many."""

    step_s: float
    interval: RunsInterval | None
    held: float
    reserved: float
    fits: bool


@dataclass(frozen=True)
class SourceScore:
    """Hold the scores of some predictions; None where no row has the measurement.

    Attributes:
        name: the source of the rows, with their block.
        n: rows that are predicted.
        refused: rows that are not.
        mean: mean of the absolute errors of the step.
        signed: mean of the errors.
        p90: the 90th percentile of the absolute errors.
        most: the largest.
        tau: Kendall's rank correlation of predicted and measured steps.
        memory_mean: mean of the absolute errors of the peak.
        memory_most: the largest.
        coverage: share of the measured steps inside of their intervals.
    """

    name: str
    n: int
    refused: int
    mean: float | None
    signed: float | None
    p90: float | None
    most: float | None
    tau: float | None
    memory_mean: float | None
    memory_most: float | None
    coverage: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def score(name: str, predictions: Sequence[RunPrediction]) -> SourceScore:
    """Return the scores of predictions, whose rows are of one source or block."""
    errors = [p.error for p in predictions if p.error is not None]
    sizes = sorted(map(abs, errors))
    memory = [abs(p.memory_error) for p in predictions if p.memory_error is not None]
    inside = [p.covered for p in predictions if p.covered is not None]
    return SourceScore(
        name,
        n=len(errors),
        refused=sum(bool(p.refused) for p in predictions),
        mean=fmean(sizes) if sizes else None,
        signed=fmean(errors) if errors else None,
        p90=percentile(sizes, 0.9),
        most=sizes[-1] if sizes else None,
        tau=kendall(
            [(p.step_s, p.row.step_s) for p in predictions if p.error is not None and p.row.step_s]
        ),
        memory_mean=fmean(memory) if memory else None,
        memory_most=max(memory, default=None),
        coverage=fmean(inside) if inside else None,
    )


def percentile(ascending: Sequence[float], share: float) -> float | None:
    """Return a percentile of ascending numbers, between the two nearest ones; None without numbers."""
    if not ascending:
        return None
    at = share * (len(ascending) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (at - below) * (ascending[above] - ascending[below])


def kendall(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Return Kendall's tau of (predicted, measured), over pairs of rows whose measurements differ by more than APART.

    Equal predictions count as half right. None if there is no such pair.
    """
    agree = total = 0
    for (a, x), (b, y) in combinations(pairs, 2):
        if abs(math.log(x / y)) <= math.log1p(APART):
            continue
        total += 1
        agree += (a > b) - (a < b) if x > y else (a < b) - (a > b)
    return agree / total if total else None


@dataclass(frozen=True)
class Scores:
    """Hold the scores of a table.

    Attributes:
        sources: by source and block.
        macro: the mean of the means of sources whose block counts; None if there are none.
        predictions: of all rows.
    """

    sources: tuple[SourceScore, ...]
    macro: float | None
    predictions: tuple[RunPrediction, ...] = field(repr=False)

    @property
    def refused(self) -> int:
        """Return the number of rows that are not predicted."""
        return sum(one.refused for one in self.sources)


def scores(predictions: Sequence[RunPrediction]) -> Scores:
    """Return the scores of predictions by source and block, the headline block first."""
    groups: dict[tuple[str, str], list[RunPrediction]] = {}
    for one in predictions:
        groups.setdefault((one.row.publisher, one.row.block), []).append(one)
    ordered = sorted(groups.items(), key=lambda item: item[0][1] != HEADLINE)
    found = {
        key: score(key[0] if key[1] == HEADLINE else f"{key[0]} ({key[1]})", members)
        for key, members in ordered
    }
    means = [s.mean for (_, block), s in found.items() if block == HEADLINE and s.mean is not None]
    return Scores(tuple(found.values()), fmean(means) if means else None, tuple(predictions))
