"""Measure intervals of time, and the idle time of a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Interval = tuple[float, float]
"""The start and end of an interval, in seconds."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Describe the idle time of a rank in a step.

    Attributes:
        busy: seconds of its compute.
        span: last end - first start - busy of its compute.
        exposed: seconds in which the rank computes nothing while a message moves to or from it; None if not known.
    """

    busy: float
    span: float
    exposed: float | None


def idle(working: Sequence[Interval], moving: Sequence[Interval] | None, busy: float) -> Idle:
    """Return the idle time between computations, which are sorted and disjoint and last `busy` seconds together."""
    span = working[-1][1] - working[0][0] - busy if working else 0.0
    return Idle(busy, span, None if moving is None else uncovered(moving, working))


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, sorted and disjoint."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        elif end > start:
            union.append((start, end))
    return union


def uncovered(intervals: Sequence[Interval], by: Sequence[Interval]) -> float:
    """Return the length of the union of `intervals` outside of `by`, which is sorted and disjoint."""
    total, reached, k = 0.0, float("-inf"), 0
    for start, end in sorted(intervals):
        if reached > start:
            start = reached
        if end > reached:
            reached = end
        while k < len(by) and by[k][1] <= start:
            k += 1
        j = k
        while start < end:
            if j == len(by) or by[j][0] >= end:
                total += end - start
                break
            total += max(0.0, by[j][0] - start)
            start = max(start, by[j][1])
            j += 1
    return total
