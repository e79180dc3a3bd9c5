"""Check a document in Chrome's trace-event format: what a viewer would not read or would show wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

PHASES = {
    "M": ("name", "pid", "args"),
    "X": ("name", "pid", "tid", "ts", "dur"),
    "C": ("name", "pid", "ts", "args"),
    "s": ("name", "cat", "id", "pid", "tid", "ts"),
    "f": ("name", "cat", "id", "pid", "tid", "ts", "bp"),
}
"""The kinds of events that Piper writes, and the keys that each must have."""


def problems(document: object) -> list[str]:
    """Return what a viewer would not read or would show wrongly; empty for a good document.

    Beside keys and types this checks that each process and thread with events has a name, that events of one thread
    nest or follow each other, and that each flow has one start and one end, the end not before the start, both within a
    span.
    """
    if not isinstance(document, Mapping) or not isinstance(document.get("traceEvents"), list):
        return ["an object with a list traceEvents is expected"]
    out: list[str] = []
    named: set[tuple[str, int, int]] = set()
    used: dict[tuple[int, int], list[tuple[float, float]]] = {}
    flows: dict[int, list[Mapping[str, Any]]] = {}
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
        elif event["ph"] in ("s", "f"):
            flows.setdefault(event["id"], []).append(event)
    out += [
        f"flow {id}: {wrong}" for id, ends in flows.items() if (wrong := _wrong_flow(ends, used))
    ]
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


def _wrong_flow(
    ends: list[Mapping[str, Any]], used: Mapping[tuple[int, int], list[tuple[float, float]]]
) -> str:
    if [e["ph"] for e in ends] != ["s", "f"]:
        return f"its events are {[e['ph'] for e in ends]}"
    if ends[0]["ts"] > ends[1]["ts"]:
        return "it ends before it starts"
    for e in ends:
        spans = used.get((e["pid"], e["tid"]), [])
        if not any(start <= e["ts"] <= end + 1e-9 * abs(end) for start, end in spans):
            return f"its {e['ph']} is in no span"
    return ""


def _wrong(event: object) -> str:
    """Return what is wrong with one event; "" for nothing."""
    if not isinstance(event, Mapping):
        return "an object is expected"
    keys = PHASES.get(str(event.get("ph")))
    if keys is None:
        return f"ph is {event.get('ph')!r}; one of {', '.join(PHASES)} is expected"
    for key in keys:
        value: Any = event.get(key)
        if key in ("pid", "tid", "id"):
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
