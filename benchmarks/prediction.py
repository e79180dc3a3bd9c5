"""Compare predictions with measurements: from a profile of 1F1B on two ranks, time and memory of other strategies.

The model is a GPT whose matrix products dominate. A round is one profile, the prediction of every strategy from it, and
a run of every strategy. Other users of the processors make a round slower and never faster, a profile as well as a run,
so an error compares the fastest prediction with the fastest run of all rounds; the errors of the rounds by themselves
are in the table too. Strategies with more ranks than the machine has cores are left out: a measured duration is that of
a rank with a core of its own, and taking turns on a core is not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Any

import piper
from benchmarks.measure import Goal, Row, extremes_row
from benchmarks.step_model import LARGE, SMALL, Regime, job
from piper.api.running.profiling import profile
from piper_ir.tools import usable_cores
from piper_runtime.launch import WARMUP_STEPS, Pool
from piper_simulator import Simulation, cpu_local, simulate

GLOBAL_BATCH = 32
STEPS, ROUNDS, QUICK_ROUNDS, QUICK_STRATEGIES = WARMUP_STEPS + 4, 5, 1, 3
PROFILED_MICROBATCHES = 8
SECTION = "prediction"
APART = 0.05
"""Pairs of strategies whose measured times differ by less say nothing about the order."""
ERROR_GOAL, ORDER_GOAL, MEMORY_GOAL = Goal("below", 10), Goal("above", 0.85), Goal("below", 0.005)
ZERO: tuple[tuple[int, int, str, dict[str, Any]], ...] = (
    (2, 1, "all", {}),
    (4, 1, "inputs", {}),
    (4, 2, "all", {}),
    (2, 2, "all", {"reduced_mb": "step"}),
    (4, 2, "products", {}),
    (4, 3, "all", {}),
    (2, 3, "inputs", {}),
    (2, 3, "all", {"resident_mb": "step", "reduced_mb": "step"}),
    (8, 3, "products", {"resident_mb": "step"}),
)
"""Microbatches, the level of ZeRO, the policy of recomputation, and windows, on two replicas."""
AGAIN = ((4, "inputs", False), (8, "products", False), (4, "inputs", True))
"""Microbatches, the policy of recomputation, and whether it is a node of its own, on two stages."""


@dataclass
class Case:
    """Hold a strategy.

    Attributes:
        predicted: per round, seconds per step in steady state.
        measured: per round, the median of the steps after the warm-up.
        simulation: the latest.
        peak: measured bytes, of the rank with the most.
    """

    name: str
    compiled: piper.Compiled
    predicted: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    simulation: Simulation | None = None
    peak: int = 0

    @property
    def times(self) -> tuple[float, float]:
        """Return predicted and measured seconds, of the fastest rounds."""
        return min(self.predicted), min(self.measured)

    @property
    def error(self) -> float:
        predicted, measured = self.times
        return predicted / measured - 1

    @property
    def errors(self) -> list[float]:
        """Return the errors of each round by itself."""
        return [p / m - 1 for p, m in zip(self.predicted, self.measured, strict=True)]

    @property
    def memory_error(self) -> float:
        assert self.simulation is not None
        return max(self.simulation.peak_bytes) / self.peak - 1

    def predict(self, costs: piper.Costs) -> None:
        self.simulation = simulate(self.compiled.plan, cpu_local(), costs=costs)
        self.predicted.append(self.simulation.period_s)

    def run(self, pool: Pool) -> None:
        run = piper.execute(
            self.compiled, steps=STEPS, launcher="processes", memory=not self.peak, pool=pool
        )
        self.measured.append(median(run.step_s[WARMUP_STEPS:]))
        self.peak = self.peak or max(run.peak_bytes.values())


def rows(quick: bool) -> Iterator[Row]:
    """Return a row per strategy, then the goals; `quick`: of some strategies of a small model."""
    chosen = strategies()
    names = [*chosen][:: max(1, len(chosen) // QUICK_STRATEGIES)] if quick else [*chosen]
    regime, rounds = (SMALL, QUICK_ROUNDS) if quick else (LARGE, ROUNDS)
    yield from predicted({n: chosen[n] for n in names}, regime, GLOBAL_BATCH, rounds)


def strategies() -> dict[str, piper.Strategy]:
    """Return pipelines and data parallelism, both together where there is a core per rank, ZeRO and recomputation.

    Pipelines have two schedules, of even and uneven stages; data parallelism differs by number of microbatches and size
    of buckets.
    """
    recipes, pp, dp = piper.recipes, piper.Mesh(pp=2), piper.Mesh(dp=2)
    schedules: dict[str, Callable[..., Any]] = {"gpipe": recipes.gpipe, "1f1b": recipes.one_f_one_b}
    chosen = {
        f"{name} pp=2 m={m}": piper.Strategy(pp, make(pp=2, microbatches=m))
        for name, make in schedules.items()
        for m in (2, 4, 8, 16)
        if (name, m) != ("1f1b", PROFILED_MICROBATCHES)
    }
    chosen["1f1b pp=2 m=8, first stage of 1 layer"] = piper.Strategy(
        pp, recipes.one_f_one_b(pp=2, microbatches=8, at=(1,))
    )
    chosen["gpipe pp=2 m=4, first stage of 3 layers"] = piper.Strategy(
        pp, recipes.gpipe(pp=2, microbatches=4, at=(3,))
    )
    for m, mb in ((1, 25), (1, 2), (2, 25), (4, 4), (8, 1), (16, 25)):
        split = piper.split(piper.where(), microbatches=m)
        chosen[f"dp=2 m={m}, buckets of {mb} MiB"] = piper.Strategy(
            dp, (split, *recipes.data_parallel(bucket_mb=mb))
        )
    if usable_cores() >= 4:
        both = (*recipes.one_f_one_b(pp=2, microbatches=4), *recipes.data_parallel())
        chosen["1f1b pp=2 dp=2 m=4"] = piper.Strategy(piper.Mesh(pp=2, dp=2), both)
    return chosen | sharing()


def sharing() -> dict[str, piper.Strategy]:
    """Return ZeRO on two replicas and recomputation on two stages; the profile has neither."""
    chosen = {}
    for m, zero, keep, windows in ZERO:
        more = "".join(f", {k}={v!r}" for k, v in windows.items())
        replicas = piper.recipes.data_parallel(zero=zero, **windows)
        again = () if keep == "all" else (piper.recompute(piper.where(), keep=keep),)
        chosen[f"dp=2 {zero=} {m=}, keep={keep}{more}"] = piper.Strategy(
            piper.Mesh(dp=2), (piper.split(piper.where(), microbatches=m), *replicas, *again)
        )
    for m, keep, apart in AGAIN:
        stages = piper.recipes.one_f_one_b(pp=2, microbatches=m)
        policy = piper.recompute(piper.where(), keep=keep, apart=apart)
        chosen[f"1f1b pp=2 {m=}, keep={keep}{', apart' * apart}"] = piper.Strategy(
            piper.Mesh(pp=2), (*stages, policy)
        )
    return chosen


def predicted(
    chosen: Mapping[str, piper.Strategy], regime: Regime, global_batch: int, rounds: int
) -> Iterator[Row]:
    """Run rounds of profile, predictions and runs, and return what they found."""
    work = job(regime, global_batch)
    known = piper.Strategy(
        piper.Mesh(pp=2),
        piper.recipes.one_f_one_b(pp=2, microbatches=min(PROFILED_MICROBATCHES, global_batch)),
    )
    cases = [Case(name, piper.compile(work, strategy)) for name, strategy in chosen.items()]
    with Pool(max(s.mesh.world for s in chosen.values())) as pool:
        for _ in range(rounds):
            costs = profile(work, known, pool=pool)
            for case in cases:
                case.predict(costs)
                case.run(pool)
    yield from map(_case_row, cases)
    yield from _goal_rows(cases)


def _case_row(case: Case) -> Row:
    assert case.simulation is not None
    shares = ", ".join(
        f"{name} {share:.1%}" for name, share in case.simulation.summary()["sources"].items()
    )
    errors, (predicted, measured) = [100 * e for e in case.errors], case.times
    note = (
        f"predicted {predicted * 1e3:.1f} ms/step ({shares}), measured {measured * 1e3:.1f}; "
        f"peak memory {case.memory_error:+.2%}{''.join(f'; {n}' for n in case.simulation.notes)}"
    )
    error = 100 * case.error
    return Row(SECTION, case.name, error, "% error", min(errors), max(errors), note=note)


def _goal_rows(cases: Sequence[Case]) -> Iterator[Row]:
    errors = [100 * abs(c.error) for c in cases]
    note = (
        f"of {len(cases)} strategies from profiles of 1F1B pp=2 m={PROFILED_MICROBATCHES}; "
        f"fastest of {len(cases[0].measured)} rounds"
    )
    yield extremes_row(SECTION, "step time: median error", errors, "%", ERROR_GOAL, note)
    single = [100 * abs(e) for c in cases for e in c.errors]
    alone = "each round by itself: its run against the prediction from its profile"
    yield extremes_row(SECTION, "step time: median error of single rounds", single, "%", note=alone)
    tau, pairs = rank_order([c.times for c in cases])
    order = f"Kendall tau over {pairs} pairs that are more than {APART:.0%} apart when measured"
    yield Row(SECTION, "step time: order", tau, "", goal=ORDER_GOAL, note=order)
    worst = max(100 * abs(c.memory_error) for c in cases)
    yield Row(SECTION, "peak memory: largest error", worst, "%", goal=MEMORY_GOAL, note=note)


def rank_order(times: Sequence[tuple[float, float]]) -> tuple[float, int]:
    """Return Kendall's tau of (predicted, measured), and how many pairs it counts; 1 of none.

    It counts the pairs that are apart when measured.
    """
    signs = [
        (a[0] > b[0]) - (a[0] < b[0]) if a[1] > b[1] else (a[0] < b[0]) - (a[0] > b[0])
        for a, b in combinations(times, 2)
        if max(a[1], b[1]) > (1 + APART) * min(a[1], b[1])
    ]
    return (sum(signs) / len(signs) if signs else 1.0), len(signs)
