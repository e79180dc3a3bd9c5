"""Check a document in Chrome's trace-event format: what a viewer would not read or would show wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

PHASES = {
    "M": ("name", "pid", "args"),
    "X": ("name", "pid", "tid", "ts", "dur"),
    "C": ("name", "pid", "ts", "args"),
}
"""The kinds of events that Piper writes, and the keys that each must have."""


def problems(document: object) -> list[str]:
    """Return what a viewer would not read or would show wrongly; empty for a good document.

    Beside keys and types this checks that each process and thread with events has a name, and that events of one thread
    nest or follow each other.
    """
    if not isinstance(document, Mapping) or not isinstance(document.get("traceEvents"), list):
        return ["an object with a list traceEvents is expected"]
    out: list[str] = []
    named: set[tuple[str, int, int]] = set()
    used: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for i, event in enumerate(document["traceEvents"]):
        wrong = _wrong(event)
        if wrong:
            out.append(f"event {i}: {wrong}")
        elif event["ph"] == "M":
            named.add((event["name"], event["pid"], event.get("tid", 0)))
        elif event["ph"] == "X":
            used.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    for (pid, tid), spans in used.items():
        if ("process_name", pid, 0) not in named or ("thread_name", pid, tid) not in named:
            out.append(f"process {pid}, thread {tid}: no name")
        spans.sort(key=lambda s: (s[0], -s[1]))
        slack = 1e-9 * max(end for _, end in spans)  # ts + dur is rounded
        if any(
            start < before - slack and before < end - slack
            for (_, before), (start, end) in pairwise(spans)
        ):
            out.append(f"process {pid}, thread {tid}: events overlap")
    return out


def _wrong(event: object) -> str:
    """Return what is wrong with one event; "" for nothing."""
    if not isinstance(event, Mapping):
        return "an object is expected"
    keys = PHASES.get(str(event.get("ph")))
    if keys is None:
        return f"ph is {event.get('ph')!r}; one of {', '.join(PHASES)} is expected"
    for key in keys:
        value: Any = event.get(key)
        if key in ("pid", "tid"):
            good = type(value) is int
        elif key in ("ts", "dur"):
            good = type(value) in (int, float) and 0 <= value < float("inf")
        elif key == "args":
            good = isinstance(value, Mapping) and (
                event["ph"] == "M" or all(type(v) is int for v in value.values())
            )
        else:
            good = isinstance(value, str) and value != ""
        if not good:
            return f"{key} is {value!r}"
    return ""
