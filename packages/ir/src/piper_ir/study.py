"""Rows of a tuner's study, and study.json: what became of each candidate, and why. `loads(StudyDocument, text)` of
`piper_ir.codec` reads it; `StudyDocument.dumps` writes every key of a row, also those without a value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal

from piper_ir.codec import FORMAT_VERSION
from piper_ir.tools import size_text


@dataclass(frozen=True)
class Row:
    """One candidate. `state` "complete": it fits. "rejected": `reason` says why, `kind` is the class of reason: the name of a
    rule (`piper_autotune.rules`), or "memory", "illegal" (it does not compile), "strategy" (the function raised), "crash",
    "hang", "confirmation" (it failed when it was run). `period_s`, `step_s` in seconds, `peak_bytes` allocated and
    `device_bytes` on the fullest rank, as predicted by `source`; a memory rule gives the `device_bytes` that are needed at
    least. `error`: predicted over measured period, less 1. `notes`: what a user should know of the durations that the engine
    used, as in `Simulation.notes`; the sweep, which scores many, says nothing of them."""

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

    def as_dict(self) -> dict[str, Any]:
        """As in study.json."""
        return asdict(self)


def limit_text(limit: int | None, by_device: Mapping[str, int]) -> str | None:
    """What a plan may hold, for a person; None for any amount. `by_device`: by type of device, where a cluster has several."""
    if limit is None or len(set(by_device.values())) < 2:
        return None if limit is None else f"{size_text(min(by_device.values(), default=limit))} per device"
    return ", ".join(f"{size_text(own)} per {device}" for device, own in by_device.items())


@dataclass(frozen=True)
class StudyDocument:
    """study.json: `trials` by number; `best` is the number of one, None when nothing can be used; `rules` say what was rejected
    before compiling, each with how often. `interrupted`: the search ended before its time, by Ctrl-C or because its storage
    failed. `device_limits`: see `limit_text`."""

    FORMAT: ClassVar[str] = "Study"

    cluster: str
    memory_limit: int | None
    seed: int
    trials: tuple[Row, ...]
    best: int | None
    rules: tuple[str, ...]
    interrupted: bool = False
    device_limits: Mapping[str, int] = field(default_factory=dict)

    def dumps(self) -> str:
        """As JSON, a line per row."""
        head = {"format": self.FORMAT, "version": FORMAT_VERSION} | asdict(replace(self, trials=()))
        del head["trials"]
        rows = ",\n  ".join(json.dumps(r.as_dict()) for r in self.trials)
        return f'{json.dumps(head)[:-1]}, "trials": [\n  {rows}\n]}}\n'
