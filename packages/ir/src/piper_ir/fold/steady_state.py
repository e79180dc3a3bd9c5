"""Find how long a step takes in steady state, when steps follow each other without a barrier in between."""

from __future__ import annotations

from collections.abc import Sequence

from piper_ir.fold.issue import Issue
from piper_ir.fold.timing import Prepared, sweep


def period(
    prepared: Prepared,
    durations: Sequence[float],
    *,
    latency: float = 0.0,
    issue: Issue | None = None,
    most: int = 64,
) -> float:
    """Return seconds per step in steady state (see `steady`), from at most `most` steps without a barrier."""
    return step_and_period(prepared, durations, latency=latency, issue=issue, most=most)[1]


def step_and_period(
    prepared: Prepared,
    durations: Sequence[float],
    *,
    latency: float = 0.0,
    issue: Issue | None = None,
    most: int = 64,
) -> tuple[float, float]:
    """Return the seconds of the first step alone (`sweep`), and the `period`."""
    last = [nodes[-1] for nodes in prepared.streams]
    host = host_seconds(issue)
    history: list[list[float]] = []
    times = first = sweep(prepared, durations, latency=latency, issue=issue)
    for k in range(most if last else 0):
        if k:
            times = sweep(prepared, durations, latency=latency, issue=issue, after=times)
        history.append([times.end[x] for x in last])
        period_s = steady(history, host)
        if period_s is not None:
            return first.makespan, period_s
    return first.makespan, later_half(history, host)


def host_seconds(issue: Issue | None) -> float:
    """Return the seconds that the busiest host needs for the instructions of a step."""
    return 0.0 if issue is None else max(issue.step_s, default=0.0)


def steady(
    history: Sequence[Sequence[float]], host: float, tolerance: float = 1e-12
) -> float | None:
    """Return the period of steps that are in steady state, None when they are not.

    They are once every stream advances by the same amount over c steps, twice in a row, for a c up to 4 (such systems
    may alternate between patterns), and no host needs longer for its instructions: a host is never blocked, and
    instructions that it issues ever earlier delay nothing. `history` has, per step, the end of each stream's last node;
    `host` is the seconds per step of the busiest host.
    """
    for c in range(1, 5):
        if len(history) > c + 1:
            gains = _gains(history[-1], history[-1 - c]) + _gains(history[-2], history[-2 - c])
            slack = tolerance * max(history[-1])
            if max(gains) - min(gains) <= slack and host * c <= max(gains) + slack:
                return max(gains) / c
    return None


def later_half(history: Sequence[Sequence[float]], host: float) -> float:
    """Return the period of steps that never get steady, as in a plan with independent parts.

    It is the period of the slowest stream or host, over the later half of the steps.
    """
    half = len(history) // 2
    return max(*_gains(history[-1], history[-1 - half]), host * half) / half if half else 0.0


def _gains(now: Sequence[float], then: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(now, then, strict=True)]
