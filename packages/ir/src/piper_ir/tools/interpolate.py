"""Between measured points: straight lines on log-log paper, and how far beyond their ends one may go."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import exp, log

REACH = 2.0
"""Beyond the first and the last point the line goes on up to this factor. Times are close to a + b x; continued by a factor of 2
from two points that are a factor of 2 apart, the line is at most 11 % below that, by a factor of 4 already 29 % (at b x = a)."""

Points = Sequence[tuple[int, float]]
"""(x, y) with ascending positive x and y >= 0."""


def log_log(points: Points, x: int) -> float | None:
    """y at x: that of a point, or on the line through the two nearest. None beyond REACH, and between no two points."""
    k = bisect_left(points, x, key=lambda p: p[0])
    if k < len(points) and points[k][0] == x:
        return points[k][1]
    if len(points) < 2 or not points[0][0] / REACH <= x <= points[-1][0] * REACH:
        return None
    k = min(max(k, 1), len(points) - 1)
    return _line(points[k - 1], points[k], x)


def within(points: Points, x: int) -> bool:
    """Whether x lies between the first and the last point."""
    return bool(points) and points[0][0] <= x <= points[-1][0]


def _line(a: tuple[int, float], b: tuple[int, float], x: int) -> float:
    if not (a[1] and b[1]):  # 0 has no logarithm
        return max(0.0, a[1] + (b[1] - a[1]) * (x - a[0]) / (b[0] - a[0]))
    slope = log(b[1] / a[1]) / log(b[0] / a[0])
    return a[1] * exp(slope * log(x / a[0]))
