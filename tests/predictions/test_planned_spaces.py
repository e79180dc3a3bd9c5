"""The spaces in which `piper plan` is judged: their committed tables, and a search judged by one."""

from __future__ import annotations

import pytest

from benchmarks.planned import judged, tables
from benchmarks.planned.spaces import FINITE, TINY, Case, FiniteSpace, count, kept, points
from piper_autotune import tune


@pytest.mark.parametrize("case", FINITE, ids=lambda case: case.name)
def test_a_committed_table_has_a_space_of_100_000_strategies(case: Case) -> None:
    entries = tables.read(tables.path_of(case))
    assert sum(entry.number for entry in entries) > 100_000
    scored = [entry for entry in entries if entry.number == 1 and entry.params]
    assert len({tuple(entry.params.items()) for entry in scored}) == len(scored)
    best = min((e for e in entries if e.rule == tables.SCORED), key=lambda e: e.period_s or 0.0)
    assert best.period_s == tables.least(entries) and (best.device_bytes or 0) < 80 << 30
    (bound,) = (e.period_s for e in entries if e.rule == "slower")
    assert bound is not None and bound > best.period_s


@pytest.mark.long
def test_a_search_is_judged_by_a_table() -> None:
    of, entries = kept(TINY), tables.read(tables.path_of(TINY))
    assert isinstance(of.space, FiniteSpace)
    every = list(points(of.space))
    assert len(every) == count(of.space) == sum(entry.number for entry in entries)
    known_s = tables.least(entries)
    together = list(tables.outcomes(of, every[:300], known_s))
    alone = [next(tables.outcomes(of, [one], known_s)) for one in every[:300:10]]
    assert together[::10] == alone, "bounds of compute that strategies share are their own"
    median, tail, bad, wrong = judged.regrets(TINY, 2, 40)
    assert 0 <= median.value <= tail.value < 0.5 and bad.met and wrong.met
    best = min((e for e in entries if e.rule == tables.SCORED), key=lambda e: e.period_s or 0.0)
    assert best.period_s is not None
    again = tables.outcomes(of, [(best.params, of.space(judged.Chosen(best.params)))], 1.0)
    assert next(iter(again)) == best, "scored again, it has the same number"
    study = tune(of.problem, of.space, trials=1, workers=0, rescore=False, **of.more)
    gap, cells = judged.judged("tiny", TINY, of, study)
    assert gap.value > 0 and cells.note.startswith("1 of "), "one candidate is not enough"
