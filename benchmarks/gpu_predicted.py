"""Predict plans for one device by formula and from a profile, then run them: step and peak of memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import piper
from benchmarks.measure import Goal, Row
from piper_runtime.launch import WARMUP_STEPS, Pool

if TYPE_CHECKING:  # other checks run without the simulator's packages
    from piper_simulator import Cluster, Simulation

STEPS = 8


@dataclass(frozen=True)
class Goals:
    """Hold the error in per cent that each may have: formula, profile, and peak of memory; None for any."""

    formula: Goal | None
    profile: Goal | None
    memory: Goal | None


@dataclass
class Case:
    """Hold a plan; per round its simulations and what a run took, in seconds per step; the bytes of its peak."""

    title: str
    compiled: piper.Compiled
    goals: Goals
    by_formula: list[Simulation] = field(default_factory=list)
    by_profile: list[Simulation] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    peak: int = 0

    def measure(self, cluster: Cluster, costs: piper.Costs, pool: Pool) -> None:
        """Measure one more round."""
        self.by_formula.append(piper.simulate(self.compiled.plan, cluster))
        self.by_profile.append(piper.simulate(self.compiled.plan, cluster, costs=costs))
        run = piper.execute(
            self.compiled, steps=WARMUP_STEPS + STEPS, launcher="processes", pool=pool
        )
        assert run.period_s is not None
        self.measured.append(run.period_s)
        self.peak = max(run.peak_bytes.values())

    def rows(self) -> Iterator[Row]:
        """Return errors in per cent, predicted / measured - 1: medians over the rounds, with their extremes."""
        for how, found, goal in (
            ("formula", self.by_formula, self.goals.formula),
            ("profile", self.by_profile, self.goals.profile),
        ):
            errors = [100 * (s.period_s / m - 1) for s, m in zip(found, self.measured, strict=True)]
            sources = ", ".join(
                f"{name} {share:.0%}" for name, share in found[-1].summary()["sources"].items()
            )
            times = (median(s.period_s for s in found) * 1e3, median(self.measured) * 1e3)
            note = (
                f"predicted {times[0]:.2f} ms/step ({sources}), measured {times[1]:.2f}; "
                f"{len(errors)} rounds"
            )
            note += "".join(f"; {n}" for n in found[-1].notes)
            error = median(errors)
            name = f"{self.title}: step, by {how}"
            yield Row(
                "predicted",
                name,
                error,
                "% error",
                min(errors),
                max(errors),
                goal,
                note,
                judged=abs(error),
            )
        planned, taken = max(found[-1].peak_bytes), found[-1].device_bytes[0] / 2**20
        note = (
            f"predicted {planned} bytes, the allocator was asked for {self.peak}; with context and "
            f"allocator {taken:.0f} MiB"
        )
        error = 100 * (planned / self.peak - 1)
        yield Row(
            "predicted",
            f"{self.title}: peak memory",
            error,
            "% error",
            goal=self.goals.memory,
            note=note,
            judged=abs(error),
        )
