"""Judge the search of `piper plan` by tables of scores (`benchmarks.planned.tables`): its time and its regret.

A space whose table has not been made is not judged; its search is timed all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from math import ceil
from typing import Any

from benchmarks.measure import Goal, Row, cpu_seconds, extremes_row
from benchmarks.planned.spaces import (
    DEEPSEEK,
    FINITE,
    LLAMA,
    MIXTRAL,
    TINY,
    Case,
    Planned,
    cell,
    kept,
    planned,
)
from benchmarks.planned.tables import SCORED, Entry, least, path_of, read
from piper_autotune import Study, tune
from piper_autotune.scoring.evaluators import Here, Outcome
from piper_autotune.scoring.scoring import Refused, Scored
from piper_compiler import Strategy, directives
from piper_ir.tools import no_garbage_collection

TRIALS, SEEDS = 60, 20
"""The trials of a search in a large space, and how many searches judge a finite one."""
FINITE_TRIALS = 100
CPU_GOALS = {
    LLAMA.name: Goal("below", 60),
    MIXTRAL.name: Goal("below", 120),
    DEEPSEEK.name: Goal("below", 120),
}
"""CPU seconds of a search after imports, with the capture of the model."""
GAP_GOAL, CELLS_GOAL = Goal("below", 0.02), Goal("below", 1)
MEDIAN_GOAL, TAIL_GOAL, NONE_GOAL = Goal("below", 0.005), Goal("below", 0.02), Goal("below", 1)
KNOWN = 1e-9
"""The difference of two scores that is rounding."""


def plan_rows(quick: bool) -> Iterator[Row]:
    """Return how long a search of a large space takes, its gap to the best known, and the meshes without a candidate."""
    for case in (TINY,) if quick else (LLAMA, MIXTRAL, DEEPSEEK):
        (of, study), seconds = cpu_seconds(partial(_searched, case, 8 if quick else TRIALS))
        note = f"{len(study.rows)} candidates looked at; {_best_text(study)}"
        name = f"{case.name} on {case.cluster}"
        yield Row(
            "plan",
            f"{name}: CPU seconds of {TRIALS} trials",
            seconds,
            "s",
            goal=CPU_GOALS.get(case.name),
            note=note,
        )
        if path_of(case).is_file():
            yield from judged(name, case, of, study)


def judged(name: str, case: Case, of: Planned, study: Study) -> Iterator[Row]:
    """Return the gap between a search's best and a table's, and the cells of the space without an answer."""
    entries = read(path_of(case))
    best = study.best_row
    assert best is not None and best.period_s is not None
    scored = [entry for entry in entries if entry.rule == SCORED]
    others = sum(entry.number for entry in entries)
    note = f"{others:,} others, {len(scored):,} scored that fit, the rest bounded"
    gap = best.period_s / least(entries) - 1
    yield Row("plan", f"{name}: best above that of others", gap, "", goal=GAP_GOAL, note=note)
    answered = {cell(row.params) for row in study.rows if row.kind != "skipped"}
    missing = {cell(entry.params) for entry in scored} - answered
    every = {cell(start) for start in of.space.starts}
    answers = f"{len(every & answered)} of {len(every)} cells of tp, cp and pp have an answer"
    yield Row(
        "plan",
        f"{name}: cells that fit and have no candidate",
        len(missing),
        "",
        goal=CELLS_GOAL,
        note=answers,
    )


def _searched(case: Case, trials: int) -> tuple[Planned, Study]:
    with no_garbage_collection():  # as `piper plan` searches
        of = planned(case)
        return of, tune(of.problem, of.space, trials=trials, workers=0, rescore=False, **of.more)


def _best_text(study: Study) -> str:
    best = study.best_row
    assert best is not None
    return ", ".join(f"{name}={value}" for name, value in best.params.items() if value != 1)


class Remembered:
    """Look scores up in a table, and score the strategies that have only a bound there."""

    width = 1

    def __init__(self, of: Planned, known: dict[Strategy, Outcome]) -> None:
        self._here, self._known = Here(of.problem, of.programs), known
        self._asked: list[tuple[Strategy, bool]] = []

    def submit(self, strategy: Strategy, engine: bool = False) -> int:
        self._asked.append((strategy, engine))
        return len(self._asked) - 1

    def result(self, ticket: int) -> Outcome:
        strategy, engine = self._asked[ticket]
        if engine:
            return self._here.result(self._here.submit(strategy, engine))
        key = _plain(strategy)
        if key not in self._known:
            self._known[key] = self._here.result(self._here.submit(strategy))
        return self._known[key]

    def close(self) -> None:
        """Do nothing: nothing was started."""


def _plain(strategy: Strategy) -> Strategy:
    return Strategy(strategy.mesh, directives.simplest(strategy.directives))


def regret_rows(quick: bool) -> Iterator[Row]:
    """Return the regrets of searches in finite spaces: the period of the best found over that of the best, less 1."""
    for case in (TINY,) if quick else FINITE:
        if path_of(case).is_file():
            yield from regrets(case, 2 if quick else SEEDS, 10 if quick else FINITE_TRIALS)


def regrets(case: Case, seeds: int, trials: int) -> Iterator[Row]:
    """Return the median and the tail of the regrets of some seeds, and how many results do not fit."""
    of, entries = kept(case), read(path_of(case))
    known = dict(_outcomes(of, entries))
    best_s, ends, bad = least(entries), list[float](), 0
    for seed in range(seeds):
        study = tune(
            of.problem,
            of.space,
            trials=trials,
            seed=seed,
            evaluator=Remembered(of, known),
            rescore=False,
            **of.more,
        )
        best = study.best_row
        assert best is not None and best.period_s is not None
        bad += (best.device_bytes or 0) > (of.problem.memory_limit or 0)
        ends.append(best.period_s / best_s - 1)
    wrong = sum(end < -KNOWN for end in ends)
    every = sum(entry.number for entry in entries)
    scored = sum(entry.rule == SCORED for entry in entries)
    note = f"{seeds} seeds, {trials} trials in {every:,} strategies, {scored:,} scored that fit"
    yield extremes_row("regret", f"{case.name}: median", ends, "", MEDIAN_GOAL, note)
    tail = sorted(ends)[ceil(0.95 * seeds) - 1]
    yield Row("regret", f"{case.name}: 95th percentile", tail, "", goal=TAIL_GOAL, note=note)
    yield Row("regret", f"{case.name}: results that do not fit", bad, "", goal=NONE_GOAL)
    yield Row("regret", f"{case.name}: better than the table's best", wrong, "", goal=NONE_GOAL)


def _outcomes(of: Planned, entries: list[Entry]) -> Iterator[tuple[Strategy, Outcome]]:
    """Yield the scored strategies of a table with their scores."""
    for entry in entries:
        if entry.rule in (SCORED, "memory") and entry.period_s is not None:
            period_s, nbytes = entry.period_s, entry.device_bytes or 0
            reason = "too much" if entry.rule == "memory" else ""
            scored = Scored(period_s, period_s, nbytes, nbytes, "sweep", reason)
            yield _plain(of.space(Chosen(entry.params))), scored
        elif entry.rule in ("illegal",):
            yield _plain(of.space(Chosen(entry.params))), Refused(entry.rule, "in the table")


class Chosen:
    """Answer a trial's questions from choices by name."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._params = params

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        return self._params[name]

    def suggest_int(self, name: str, low: int, high: int) -> Any:
        return self._params[name]

    def skip(self, reason: str) -> None:
        raise AssertionError(f"{json.dumps(dict(self._params))} is in the table: {reason}")
