"""Judge the tuner in a space with shared states and recomputation, against scores of the whole space.

python -m benchmarks.tuner_shared                 search with 20 seeds in the table of scores, as `make bench` does
python -m benchmarks.tuner_shared --evaluate      score all strategies on two cores and write the table

The table is committed, so that a search can be judged without scoring the space again. What it says may be older than
the code; a row of the results says by how much a sample differs that is scored now.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

from optuna.trial import FixedTrial

from benchmarks import shared_space as space
from benchmarks.measure import Row
from benchmarks.tuner import (
    CORES,
    MEDIAN_GOAL,
    NONE_GOAL,
    SEEDS,
    TRIALS,
    Table,
    evaluate_all,
    regret_of,
    scored_count,
)
from piper_autotune import Study, tune
from piper_autotune.scoring.evaluators import Here, Outcome, Processes
from piper_autotune.scoring.scoring import Scored
from piper_autotune.space.problem import Programs, TuningProblem
from piper_autotune.space.rules import PruningRules
from piper_compiler import Strategy

SCORES = Path(__file__).parent / "measured" / "tuner-shared-space.csv.gz"
SAMPLE = 40
"""The strategies that are scored again, to compare them with the table."""
CHECKED = 500
"""The strategies whose bounds are compared with the table."""
SECTION = "tune-shared"
Scores = Sequence[tuple[float, int]]
"""The seconds and bytes of each strategy, in the order of the points."""


def rows(quick: bool) -> Iterator[Row]:
    """Return how far searches end from the best strategy of the table, and whether the table and the bounds hold."""
    problem, programs, more = space.problem()
    scores = read(SCORES)
    strategies = [space.strategy(FixedTrial(point)) for point in space.points()]
    outcomes = {s: outcome(problem, *score) for s, score in zip(strategies, scores, strict=True)}
    yield from sampled(problem, programs, outcomes, 5 if quick else SAMPLE)
    yield from pruned(problem, programs, outcomes, 50 if quick else CHECKED)
    yield from regrets(problem, more, outcomes, 3 if quick else SEEDS)


def evaluate(
    problem: TuningProblem,
    programs: Programs,
    more: Mapping[str, Any],
    strategies: Sequence[Strategy],
) -> Scores:
    """Score strategies on two cores."""
    pool = Processes(problem, programs, CORES, 600.0, more["modules"])
    try:
        found = evaluate_all(pool, strategies)
    finally:
        pool.close()
    wrong = [o for o in found if not isinstance(o, Scored)]
    assert not wrong, wrong[0]
    return [(o.period_s, o.device_bytes) for o in found if isinstance(o, Scored)]


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
    yield Row(SECTION, "scores that differ from the table's, at most by", far, "", note=note)


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
            found = rules.check(strategy, bound)
            seen += found is not None
            wrong += found is not None and not right
    fitting = sum(not o.reason for o in outcomes.values())
    note = (
        f"{seen:,} of {2 * count:,} checks reject; {fitting:,} of {len(outcomes):,} strategies fit"
    )
    yield Row(
        SECTION,
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
    found = sorted(regret_of(s, least) for s in studies)
    bad = sum(s.best is None or bool(outcomes[s.best].reason) for s in studies)
    looked = (
        f"{mean(len(s.rows) for s in studies):.0f} candidates looked at, "
        f"{mean(map(scored_count, studies)):.0f} compiled"
    )
    note = (
        f"{seeds} seeds, {TRIALS} trials in {len(outcomes):,} strategies that the sampler has not "
        f"seen; {looked}"
    )
    yield Row(SECTION, "regret, median", median(found), "", found[0], found[-1], MEDIAN_GOAL, note)
    yield Row(SECTION, "regret, 95th percentile", found[ceil(0.95 * len(found)) - 1], "", note=note)
    yield Row(SECTION, "results that do not fit", bad, "", goal=NONE_GOAL, note=note)


def search(
    problem: TuningProblem, more: Mapping[str, Any], outcomes: Mapping[Strategy, Outcome], seed: int
) -> Study:
    """Search in the table; strategies that are not in it would be an error."""
    return tune(
        problem, space.strategy, trials=TRIALS, seed=seed, evaluator=Table(outcomes), **more
    )


def main(argv: Sequence[str]) -> int:
    """Score the space, or search in it; exit code 1 where a goal is missed."""
    if "--evaluate" in argv:
        strategies = [space.strategy(FixedTrial(point)) for point in space.points()]
        write(SCORES, evaluate(*space.problem(), strategies))
        print(f"{len(strategies):,} scores in {SCORES}")
        return 0
    met = True
    for row in rows("--quick" in argv):
        print(f"{row.name}: {row.value:.4g} {row.unit} {row.note}")
        met = met and row.met is not False
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
