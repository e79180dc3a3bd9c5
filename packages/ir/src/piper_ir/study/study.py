"""Describe a tuner's study and its file study.json: the result for each candidate, and why.

`loads(StudyDocument, text)` of `piper_ir.ground.codec` reads the file. `StudyDocument.dumps` writes every key of a row,
also those without a value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal

from piper_ir.ground.codec import FORMAT_VERSION
from piper_ir.tools import size_text


@dataclass(frozen=True)
class Row:
    """Hold the result for one candidate.

    Attributes:
        state: "complete" when it fits.
        params: the values that the search chose.
        period_s: the predicted seconds per step in steady state.
        step_s: the predicted seconds of the first step.
        peak_bytes: the predicted bytes that are allocated on the fullest rank.
        device_bytes: the predicted bytes of the fullest rank's device; from a memory rule, a lower bound.
        source: the predictor.
        reason: why it was rejected.
        kind: the class of the reason: the name of a rule (`piper_autotune.space.rules`), or "memory", "illegal" (it
            does not compile), "strategy" (the function raised), "crash", "hang", or "confirmation" (it failed when it
            was run).
        measured_period_s: the measured seconds per step.
        measured_peak_bytes: the measured bytes on the fullest rank.
        error: predicted over measured period, less 1.
        notes: remarks on the durations that the engine used, as in `Simulation.notes`; the sweep, which scores many
            candidates, has none.
        low_s: the lower end of the interval in which 80 % of published runs fall, if the engine gave the times.
        high_s: the upper end of that interval.
        value: the value that the search minimises, if that is not the period: device-seconds or dollars per token.
    """

    number: int
    state: Literal["complete", "rejected"]
    params: Mapping[str, Any] = field(default_factory=dict)
    period_s: float | None = None
    step_s: float | None = None
    peak_bytes: int | None = None
    device_bytes: int | None = None
    source: Literal["sweep", "engine"] | None = None
    reason: str | None = None
    kind: str | None = None
    measured_period_s: float | None = None
    measured_peak_bytes: int | None = None
    error: float | None = None
    notes: tuple[str, ...] = ()
    low_s: float | None = None
    high_s: float | None = None
    value: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the row as it stands in study.json."""
        return asdict(self)


def objective_of(row: Row, measured: bool = False) -> float:
    """Return the objective of a row, from its prediction or its measured period; infinite if it is not known."""
    seconds = row.measured_period_s if measured else row.period_s
    if seconds is None:
        return float("inf")
    return (
        seconds if row.value is None or not row.period_s else seconds * (row.value / row.period_s)
    )


def limit_text(limit: int | None, by_device: Mapping[str, int]) -> str | None:
    """Return a text for the bytes that a plan may hold; None for any amount.

    `by_device` has the limit by type of device, if a cluster has several.
    """
    if limit is None or len(set(by_device.values())) < 2:
        return (
            None
            if limit is None
            else f"{size_text(min(by_device.values(), default=limit))} per device"
        )
    return ", ".join(f"{size_text(own)} per {device}" for device, own in by_device.items())


@dataclass(frozen=True)
class StudyDocument:
    """Hold the content of study.json.

    Attributes:
        memory_limit: bytes that a plan may hold; None for any amount.
        trials: the candidates, by number.
        best: the number of the best one; None when nothing can be used.
        rules: texts that say which candidates were rejected before compiling, each with how often.
        interrupted: whether the search ended early, by Ctrl-C or because its storage failed.
        device_limits: memory limits by type of device (see `limit_text`).
        advice: the effect of one more word on the best strategy.
        objective: the quantity that the search minimises.
        repeated: how many proposals made a plan that was known already.
        exhausted: whether every candidate of the space was proposed.
        interval_share: the share by which 80 % of published runs are at most longer than predicted; 0 if durations are
            given or measured.
        interval_stack: name of the software stack whose runs say so; "" for none.
    """

    FORMAT: ClassVar[str] = "Study"

    cluster: str
    memory_limit: int | None
    seed: int
    trials: tuple[Row, ...]
    best: int | None
    rules: tuple[str, ...]
    interrupted: bool = False
    device_limits: Mapping[str, int] = field(default_factory=dict)
    advice: tuple[str, ...] = ()
    objective: str = "period"
    repeated: int = 0
    exhausted: bool = False
    interval_share: float = 0.0
    interval_stack: str = ""

    def dumps(self) -> str:
        """Return the study as JSON with a line per row."""
        head = {"format": self.FORMAT, "version": FORMAT_VERSION} | asdict(replace(self, trials=()))
        del head["trials"]
        rows = ",\n  ".join(json.dumps(r.as_dict()) for r in self.trials)
        return f'{json.dumps(head)[:-1]}, "trials": [\n  {rows}\n]}}\n'
