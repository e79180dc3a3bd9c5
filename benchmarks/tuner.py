"""Measure the tuner: plans compiled and scored per second, and how far from the true best its searches end."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil
from pathlib import Path
from statistics import mean, median
from typing import Any

import optuna
from optuna.trial import FixedTrial

from benchmarks import tuner_space as space
from benchmarks.measure import Goal, Row
from piper_autotune import Study, TuningProblem, tune
from piper_autotune.scoring.evaluators import Evaluator, Outcome, Processes
from piper_autotune.scoring.scoring import Refused, Scored
from piper_autotune.space.problem import Programs
from piper_autotune.space.rules import RULES, PruningRules
from piper_autotune.space.space import space_key
from piper_compiler import Strategy, compile_program

CORES = 2
RATE_GOAL, SHARED_GOAL = Goal("above", 20), Goal("above", 15)
"""Plans per second, and those with states that ranks share."""
BATCHES = 5
"""The count of plans whose rate is measured is prime to the number of schedules and levels, so that each has all."""
SEEDS, TRIALS = 20, 100
OTHERS = 5
"""Seeds of the samplers that ours is compared with."""
MEDIAN_GOAL, TAIL_GOAL, NONE_GOAL = Goal("below", 0.01), Goal("below", 0.03), Goal("below", 1)
RESULTS = Path(__file__).parent / "results"
SIZES = space.SIZES


def rows(quick: bool) -> Iterator[Row]:
    """Return how fast, then how well."""
    problem, programs, more = space.problem(SIZES)
    yield _rate(
        problem,
        programs,
        more,
        space.large(SIZES.layers, 18 if quick else 148),
        RATE_GOAL,
        "16 layers, pp=8",
    )
    shared = space.large_shared(SIZES.layers, 18 if quick else 78)
    yield _rate(
        problem,
        programs,
        more,
        shared,
        SHARED_GOAL,
        "16 layers, pp=4 x dp=2, zero=0, 1, 2, 3 alike",
    )
    table, row = exhaustive(problem, programs, more)
    yield row
    yield from regrets(problem, programs, table, 3 if quick else SEEDS)


def _rate(
    problem: TuningProblem,
    programs: Programs,
    more: Mapping[str, Any],
    made: Sequence[Strategy],
    goal: Goal,
    what: str,
) -> Row:
    """Return the rate of distinct strategies, on CORES processes.

    The processes have started and know the program. It is the median of their rates over BATCHES parts of the work.
    """
    sizes = [_instructions(problem, programs, s) for s in made[: len(space.LEVELS)]]
    pool = Processes(problem, programs, CORES, 600.0, more["modules"])
    try:
        evaluate_all(
            pool, made[: 4 * CORES]
        )  # a worker that starts late leaves the first ones to the other
        rates = []
        for k in range(BATCHES):
            work = made[4 * CORES + k :: BATCHES]  # both schedules and all kinds of cuts in each
            begin = time.perf_counter()
            evaluate_all(pool, work)
            rates.append(len(work) / (time.perf_counter() - begin))
    finally:
        pool.close()
    name = (
        f"compiled and scored on {CORES} cores, plans of {min(sizes):,} to {max(sizes):,} "
        f"instructions"
    )
    note = f"median of {BATCHES} x {len(work)} plans, {what}"
    return Row("tune", name, median(rates), "plans/s", min(rates), max(rates), goal, note)


def _instructions(problem: TuningProblem, programs: Programs, strategy: Strategy) -> int:
    plan = compile_program(
        problem.program, strategy, global_batch=problem.global_batch, training=problem.training
    ).plan
    return sum(len(role.program) for role in plan.roles)


def evaluate_all(evaluator: Evaluator, strategies: Sequence[Strategy]) -> list[Outcome]:
    """Evaluate all of them, a few at a time."""
    tickets: list[int] = []
    out: list[Outcome] = []
    for strategy in strategies:
        tickets.append(evaluator.submit(strategy))
        if len(tickets) - len(out) >= evaluator.width:
            out.append(evaluator.result(tickets[len(out)]))
    return out + [evaluator.result(t) for t in tickets[len(out) :]]


def exhaustive(
    problem: TuningProblem, programs: Programs, more: Mapping[str, Any]
) -> tuple[dict[Strategy, Outcome], Row]:
    """Compile and score every strategy of the space once.

    The outcomes are kept in benchmarks/results for the same space, sizes and sources.
    """
    strategies = [space.strategy(FixedTrial(p), SIZES.layers) for p in space.points()]
    path = RESULTS / f"tuner-{_key(problem)}.json"
    known = json.loads(path.read_text()) if path.is_file() else None
    if known is None:
        begin = time.perf_counter()
        pool = Processes(problem, programs, CORES, 600.0, more["modules"])
        try:
            outcomes = evaluate_all(pool, strategies)
        finally:
            pool.close()
        known = {"seconds": time.perf_counter() - begin, "outcomes": [asdict(o) for o in outcomes]}
        RESULTS.mkdir(exist_ok=True)
        path.write_text(json.dumps(known))
        note = "taken now"
    else:
        note = f"kept from an earlier run in {path.name}"
    outcomes = [
        Refused(**o) if "kind" in o else Scored(**{**o, "notes": tuple(o["notes"])})
        for o in known["outcomes"]
    ]
    fitting = sum(isinstance(o, Scored) and not o.reason for o in outcomes)
    row = Row(
        "tune",
        f"all {len(strategies):,} strategies",
        known["seconds"],
        "s",
        note=f"{fitting:,} fit; {note}",
    )
    return dict(zip(strategies, outcomes, strict=True)), row


def _key(problem: TuningProblem) -> str:
    """Return a key of what the outcomes depend on: the space, and the sources of what compiles and scores."""
    packages = Path(__file__).resolve().parent.parent / "packages"
    digest = hashlib.sha256()
    for name in ("ir", "capture", "compiler", "simulator", "autotune"):
        for source in sorted((packages / name / "src").rglob("*.py")):
            digest.update(source.read_bytes())
    return space_key(
        space.strategy, digest.hexdigest(), sorted(space.CHOICES.items()), SIZES, *problem.facts()
    )


@dataclass
class Table:
    """Look scores up in place of scoring.

    A score that is not there is an error: the space would not be the one evaluated. Advice goes beyond it (those
    requests are for the event engine), and finds nothing there.
    """

    outcomes: Mapping[Strategy, Outcome]

    def __post_init__(self) -> None:
        self.width = 1
        self._asked: list[tuple[Strategy, bool]] = []

    def submit(self, strategy: Strategy, engine: bool = False) -> int:
        self._asked.append((strategy, engine))
        return len(self._asked) - 1

    def result(self, ticket: int) -> Outcome:
        strategy, engine = self._asked[ticket]
        if engine and strategy not in self.outcomes:
            return Refused("refused", "not in the table")
        return self.outcomes[strategy]

    def close(self) -> None:
        """Nothing was started."""


def regrets(
    problem: TuningProblem, programs: Programs, table: Mapping[Strategy, Outcome], seeds: int
) -> Iterator[Row]:
    """Return the regrets of the tuner, then those of Optuna's samplers alone.

    A regret is the period of the best found over that of the best there is, less 1.
    """
    scored = {s: o for s, o in table.items() if isinstance(o, Scored)}
    least = min(o.period_s for o in scored.values() if not o.reason)
    judge = PruningRules(problem, programs)
    wrong = [s for s, o in scored.items() if judge.check(s) is not None and not o.reason]
    pruned = sum(judge.check(s) is not None for s in scored)
    yield Row(
        "tune",
        "candidates pruned that would fit",
        len(wrong),
        "",
        goal=NONE_GOAL,
        note=f"{pruned:,} pruned for memory",
    )
    studies = [_search(problem, table, seed, None) for seed in range(seeds)]
    found = sorted(regret_of(s, least) for s in studies)
    bad = sum(s.best is None or bool(scored[s.best].reason) for s in studies)
    looked = (
        f"{mean(len(s.rows) for s in studies):.0f} candidates looked at, "
        f"{mean(map(scored_count, studies)):.0f} compiled"
    )
    note = f"{seeds} seeds, {TRIALS} trials; {looked}"
    yield Row("tune", "regret, median", median(found), "", found[0], found[-1], MEDIAN_GOAL, note)
    yield Row(
        "tune",
        "regret, 95th percentile",
        found[ceil(0.95 * len(found)) - 1],
        "",
        goal=TAIL_GOAL,
        note=note,
    )
    yield Row("tune", "results that do not fit", bad, "", goal=NONE_GOAL, note=note)
    for name, sampler in (
        ("TPE", optuna.samplers.TPESampler),
        ("random", optuna.samplers.RandomSampler),
    ):
        others = sorted(
            regret_of(_search(problem, table, k, sampler(seed=k)), least)
            for k in range(min(seeds, OTHERS))
        )
        note = f"{len(others)} seeds, the same rules"
        yield Row(
            "tune",
            f"regret with Optuna's {name}, median",
            median(others),
            "",
            others[0],
            others[-1],
            note=note,
        )


def _search(
    problem: TuningProblem,
    table: Mapping[Strategy, Outcome],
    seed: int,
    sampler: optuna.samplers.BaseSampler | None,
) -> Study:
    function = partial(space.strategy, layers=SIZES.layers)
    return tune(
        problem, function, trials=TRIALS, seed=seed, sampler=sampler, evaluator=Table(table)
    )


def regret_of(study: Study, least: float) -> float:
    best = study.best_row
    assert best is not None and best.period_s is not None
    return best.period_s / least - 1


def scored_count(study: Study) -> int:
    return sum(r.kind not in RULES for r in study.rows)
