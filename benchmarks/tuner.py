"""Measure the tuner: plans compiled and scored per second, and how far from the true best its searches end.

python -m benchmarks.tuner --evaluate      score all strategies of the space on two cores and write the table

The space has shared states and recomputation. The table of its scores is committed, so that a search can be judged
without scoring the space again. What it says may be older than the code; a row of the results says by how much a
sample differs that is scored now.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

from optuna.trial import FixedTrial

from benchmarks import shared_space as space
from benchmarks.measure import Goal, Row, cpu_seconds, extremes_row
from piper_autotune import Study, tune
from piper_autotune.scoring.evaluators import Evaluator, Here, Outcome, Processes
from piper_autotune.scoring.scoring import Refused, Scored
from piper_autotune.space.problem import Programs, TuningProblem
from piper_autotune.space.rules import RULES, PruningRules
from piper_compiler import Strategy

SCORES = Path(__file__).parent / "measured" / "tuner-shared-space.csv.gz"
CORES, BATCHES, PLANS = 2, 5, 60
"""The processes that make the table; the parts of the work whose rates are measured, and the plans in all of them."""
SEEDS, TRIALS = 20, 100
SAMPLE, CHECKED = 40, 500
"""The strategies that are scored again, and those whose bounds are compared with the table."""
RATE_GOAL = Goal("above", 7.5)
"""Plans per second and core."""
MEDIAN_GOAL, TAIL_GOAL, NONE_GOAL = Goal("below", 0.01), Goal("below", 0.03), Goal("below", 1)
Scores = Sequence[tuple[float, int]]
"""The seconds and bytes of each strategy, in the order of the points."""


def rows(quick: bool) -> Iterator[Row]:
    """Return how fast strategies are scored, whether table and bounds hold, and how far searches end from the best."""
    problem, programs, more = space.problem()
    strategies = [space.strategy(FixedTrial(point)) for point in space.points()]
    scores = zip(strategies, read(SCORES), strict=True)
    outcomes = {s: outcome(problem, *score) for s, score in scores}
    count = PLANS // 4 if quick else PLANS
    yield rate(problem, programs, Random(2).sample(strategies, 1 + count))
    yield from sampled(problem, programs, outcomes, 5 if quick else SAMPLE)
    yield from pruned(problem, programs, outcomes, 50 if quick else CHECKED)
    yield from regrets(problem, more, outcomes, 3 if quick else SEEDS)


def rate(problem: TuningProblem, programs: Programs, strategies: Sequence[Strategy]) -> Row:
    """Return the rate of distinct strategies in CPU time: the median over BATCHES parts of the work.

    The first strategy is not counted.
    """
    here = Here(problem, programs)
    evaluate_all(here, strategies[:1])
    parts = [strategies[1 + k :: BATCHES] for k in range(BATCHES)]
    rates = [len(part) / cpu_seconds(partial(evaluate_all, here, part))[1] for part in parts]
    name, note = "compiled and scored by a core", f"CPU time; {BATCHES} x {len(parts[-1])} plans"
    return extremes_row("tune", name, rates, "plans/s", RATE_GOAL, note)


def evaluate_all(evaluator: Evaluator, strategies: Sequence[Strategy]) -> list[Outcome]:
    """Evaluate all of them, a few at a time."""
    tickets: list[int] = []
    outcomes: list[Outcome] = []
    for strategy in strategies:
        tickets.append(evaluator.submit(strategy))
        if len(tickets) - len(outcomes) >= evaluator.width:
            outcomes.append(evaluator.result(tickets[len(outcomes)]))
    return outcomes + [evaluator.result(t) for t in tickets[len(outcomes) :]]


def evaluate(
    problem: TuningProblem,
    programs: Programs,
    more: Mapping[str, Any],
    strategies: Sequence[Strategy],
) -> Scores:
    """Score strategies on two cores."""
    pool = Processes(problem, programs, CORES, 600.0, more["modules"])
    try:
        outcomes = evaluate_all(pool, strategies)
    finally:
        pool.close()
    wrong = [o for o in outcomes if not isinstance(o, Scored)]
    assert not wrong, wrong[0]
    return [(o.period_s, o.device_bytes) for o in outcomes if isinstance(o, Scored)]


def write(path: Path, scores: Scores) -> None:
    """Write scores as a compressed table, with the same bytes for the same scores."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(("period_s", "device_bytes"))
    out.writerows((f"{period_s:.9g}", nbytes) for period_s, nbytes in scores)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def read(path: Path) -> Scores:
    """Return the scores of a table."""
    lines = csv.DictReader(io.StringIO(gzip.decompress(path.read_bytes()).decode()))
    return [(float(line["period_s"]), int(line["device_bytes"])) for line in lines]


def outcome(problem: TuningProblem, period_s: float, nbytes: int) -> Scored:
    """Return what scoring would say."""
    limit = problem.memory_limit
    return Scored(
        period_s,
        period_s,
        nbytes,
        nbytes,
        "sweep",
        "too much" if limit is not None and nbytes > limit else "",
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


def sampled(
    problem: TuningProblem, programs: Programs, outcomes: Mapping[Strategy, Scored], count: int
) -> Iterator[Row]:
    """Return by how much scores of today differ from those of the table."""
    here, far = Here(problem, programs), 0.0
    for strategy in Random(0).sample(list(outcomes), count):
        now, then = here.result(here.submit(strategy)), outcomes[strategy]
        assert isinstance(now, Scored), now
        far = max(
            far,
            abs(now.period_s / then.period_s - 1),
            abs(now.device_bytes / then.device_bytes - 1),
        )
    note = (
        f"{count} of {len(outcomes):,} strategies scored again; where it is large, run --evaluate"
    )
    yield Row("tune", "scores that differ from the table's, at most by", far, "", note=note)


def pruned(
    problem: TuningProblem, programs: Programs, outcomes: Mapping[Strategy, Scored], count: int
) -> Iterator[Row]:
    """Return how many strategies that fit, or are among the fastest, the rules would reject."""
    rules = PruningRules(problem, programs)
    known_s = median(o.period_s for o in outcomes.values() if not o.reason)
    seen, wrong = 0, 0
    for strategy in Random(1).sample(list(outcomes), count):
        exact = outcomes[strategy]
        for bound, right in (
            (float("inf"), bool(exact.reason)),
            (known_s, bool(exact.reason) or exact.period_s > known_s),
        ):
            rejection = rules.check(strategy, bound)
            seen += rejection is not None
            wrong += rejection is not None and not right
    fitting = sum(not o.reason for o in outcomes.values())
    note = (
        f"{seen:,} of {2 * count:,} checks reject; {fitting:,} of {len(outcomes):,} strategies fit"
    )
    yield Row(
        "tune",
        "strategies pruned that would fit and be faster",
        wrong,
        "",
        goal=NONE_GOAL,
        note=note,
    )


def regrets(
    problem: TuningProblem, more: Mapping[str, Any], outcomes: Mapping[Strategy, Scored], seeds: int
) -> Iterator[Row]:
    """Return the regrets of the tuner: the period of the best found over that of the best there is, less 1."""
    least = min(o.period_s for o in outcomes.values() if not o.reason)
    studies = [search(problem, more, outcomes, seed) for seed in range(seeds)]
    ends = sorted(regret_of(s, least) for s in studies)
    bad = sum(s.best is None or bool(outcomes[s.best].reason) for s in studies)
    looked = (
        f"{mean(len(s.rows) for s in studies):.0f} candidates looked at, "
        f"{mean(map(scored_count, studies)):.0f} compiled"
    )
    note = f"{seeds} seeds, {TRIALS} trials in {len(outcomes):,} strategies that the sampler has not seen; {looked}"
    yield extremes_row("tune", "regret, median", ends, "", MEDIAN_GOAL, note)
    tail = ends[ceil(0.95 * len(ends)) - 1]
    yield Row("tune", "regret, 95th percentile", tail, "", goal=TAIL_GOAL, note=note)
    yield Row("tune", "results that do not fit", bad, "", goal=NONE_GOAL, note=note)


def search(
    problem: TuningProblem, more: Mapping[str, Any], outcomes: Mapping[Strategy, Outcome], seed: int
) -> Study:
    """Search in the table; strategies that are not in it would be an error."""
    return tune(
        problem, space.strategy, trials=TRIALS, seed=seed, evaluator=Table(outcomes), **more
    )


def regret_of(study: Study, least: float) -> float:
    best = study.best_row
    assert best is not None and best.period_s is not None
    return best.period_s / least - 1


def scored_count(study: Study) -> int:
    return sum(r.kind not in RULES for r in study.rows)


def main(argv: Sequence[str]) -> None:
    """Score the space and write the table."""
    if argv != ["--evaluate"]:
        raise SystemExit(__doc__)
    strategies = [space.strategy(FixedTrial(point)) for point in space.points()]
    write(SCORES, evaluate(*space.problem(), strategies))
    print(f"{len(strategies):,} scores in {SCORES}")


if __name__ == "__main__":
    main(sys.argv[1:])
