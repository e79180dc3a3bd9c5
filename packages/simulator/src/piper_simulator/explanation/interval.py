"""Estimate how far a step may be from its prediction, by the spread of the measured durations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from piper_ir.program.costs import Costs, Duration
from piper_simulator.durations.checked import model_for
from piper_simulator.explanation.whatif import Case

SIGMAS = 1.4826
"""The standard deviations per median absolute deviation of a normal distribution."""


@dataclass(frozen=True, slots=True)
class StepInterval:
    """Hold an interval of the seconds of a step, by Monte Carlo.

    In each draw every instruction takes an independent, normally distributed time around its duration, at least zero.
    Percentiles lie above the step itself if many instructions wait for the latest of several.

    Attributes:
        low: percentile 5.
        median: percentile 50.
        high: percentile 95.
        fast: the step when all durations are one spread shorter at once.
        slow: the step when all are one spread longer at once, as on a machine that is disturbed as a whole.
        covered: the share of all seconds that has a spread. The rest (formulas, tables, given durations) is held fixed,
            and its errors are not in the interval.
        draws: how many draws.
        seed: seed of the draws.
    """

    low: float
    median: float
    high: float
    fast: float
    slow: float
    covered: float
    draws: int
    seed: int


def interval(case: Case, *, draws: int = 100, seed: int = 0) -> StepInterval | None:
    """Return the interval of a case; None when no duration has a spread."""
    if case.costs is None:
        return None
    later = model_for(case.plan, case.cluster, _longer(case.costs), case.model)
    works = [later.work(role, instr).seconds for role, _, instr in case.plan.instructions()]
    spreads = [max(0.0, w - now.seconds) for w, now in zip(works, case.work, strict=True)]
    issue_spread = max(0.0, later.issue_s - case.issue_s)
    if not any(spreads) and not issue_spread:
        return None
    random = Random(seed)

    def step(by: Callable[[], float]) -> float:
        """Return the seconds of the step when each duration changes by so many of its spreads."""
        durations = [
            max(0.0, d + by() * s) if s else d for d, s in zip(case.durations, spreads, strict=True)
        ]
        return case.run(durations, max(0.0, case.issue_s + by() * issue_spread)).makespan

    makespans = sorted(step(lambda: random.gauss(0.0, SIGMAS)) for _ in range(draws))
    low, median, high = (makespans[int(q * (draws - 1) + 0.5)] for q in (0.05, 0.5, 0.95))
    total = sum(case.durations)
    covered = sum(d for d, s in zip(case.durations, spreads) if s) / total if total else 0.0
    return StepInterval(
        low, median, high, step(lambda: -1.0), step(lambda: 1.0), covered, draws, seed
    )


def _longer(costs: Costs) -> Costs:
    """Return the costs with every duration one spread longer; spreads of parts add up as their times do."""
    host = costs.host
    if host is not None:
        host = replace(
            host,
            issue_s=host.issue_s + host.issue_spread_s,
            comm_s=host.comm_s + host.comm_spread_s,
        )
    return replace(
        costs,
        compute={
            chunk: {step: _more(d) for step, d in steps.items()}
            for chunk, steps in costs.compute.items()
        },
        comm=tuple(replace(c, duration=_more(c.duration)) for c in costs.comm),
        steps=tuple(replace(s, duration=_more(s.duration)) for s in costs.steps),
        parts=tuple(replace(p, duration=_more(p.duration)) for p in costs.parts),
        host=host,
    )


def _more(duration: Duration) -> Duration:
    return replace(duration, seconds=duration.seconds + duration.spread)
