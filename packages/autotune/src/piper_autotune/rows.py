"""Rows of a study: what became of each candidate, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from piper_ir.errors import FormatError

GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Row:
    """One candidate. `state` "complete": it fits. "rejected": `reason` says why, `kind` is the class of reason: the name of a
    rule (`piper_autotune.rules`), or "memory", "illegal" (it does not compile), "strategy" (the function raised), "crash",
    "hang", "confirmation" (it failed when it was run). `period_s`, `step_s` in seconds, `peak_bytes` allocated and
    `device_bytes` on the fullest rank, as predicted by `source`; a memory rule gives the `device_bytes` that are needed at
    least. `error`: predicted over measured period, less 1."""

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

    def as_dict(self) -> dict[str, Any]:
        """As in study.json."""
        return asdict(self)


def row_from(data: Any, where: str) -> Row:
    """The inverse of `as_dict`. FormatError for anything else."""
    known = {f.name for f in fields(Row)}
    if not isinstance(data, dict) or data.keys() != known:
        raise FormatError(f"{where}: a row is an object with the keys {', '.join(sorted(known))}")
    if type(data["number"]) is not int or data["state"] not in ("complete", "rejected") or not isinstance(data["params"], dict):
        raise FormatError(f'{where}: "number" is an integer, "state" complete or rejected, "params" an object')
    return Row(**data)


def size_text(nbytes: float) -> str:
    """Bytes for a person: "1.50 GiB", below that in MiB, below a MiB in bytes."""
    if abs(nbytes) >= GIB:
        return f"{nbytes / GIB:.2f} GiB"
    return f"{nbytes / MIB:.2f} MiB" if abs(nbytes) >= MIB else f"{nbytes:.0f} bytes"


def time_text(seconds: float) -> str:
    """Seconds for a person."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3f} ms"
