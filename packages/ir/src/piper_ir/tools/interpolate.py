"""Interpolate between measured points by straight lines on log-log paper, and a little beyond their ends."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import exp, log

REACH = 2.0
"""The factor up to which the line goes on beyond the first and the last point.

Times are close to a + b x. Continued by a factor of 2 from two points that are a factor of 2 apart, the line is at most
11 % below that; by a factor of 4 already 29 % (at b x = a).
"""

Points = Sequence[tuple[int, float]]
"""The measured points (x, y) with ascending x >= 0 and y >= 0. A point at 0 stands for itself: no line leads there."""


def log_log(points: Points, x: int) -> float | None:
    """Return y at x: that of a point, or that on the line through the two nearest points.

    The result is None beyond REACH, if there are no two points, and if their line leads out of all numbers.
    """
    k = bisect_left(points, x, key=lambda p: p[0])
    if k < len(points) and points[k][0] == x:
        return points[k][1]
    if points and points[0][0] == 0:
        points, k = points[1:], k - 1
    if len(points) < 2 or not points[0][0] / REACH <= x <= points[-1][0] * REACH:
        return None
    k = min(max(k, 1), len(points) - 1)
    try:
        return _line(points[k - 1], points[k], x)
    except OverflowError:  # from points that are nearer to each other than their noise
        return None


def within(points: Points, x: int) -> bool:
    """Return whether x lies between the first and the last point."""
    return bool(points) and points[0][0] <= x <= points[-1][0]


def _line(a: tuple[int, float], b: tuple[int, float], x: int) -> float:
    if not (a[1] and b[1]):  # 0 has no logarithm
        return max(0.0, a[1] + (b[1] - a[1]) * (x - a[0]) / (b[0] - a[0]))
    slope = (log(b[1]) - log(a[1])) / log(b[0] / a[0])  # the ratio of far values may not be a float
    return exp(log(a[1]) + slope * log(x / a[0]))
