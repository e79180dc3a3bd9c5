"""The spaces in which `piper plan` is judged: their committed tables, and a search judged by one."""

from __future__ import annotations

import pytest

from benchmarks.planned import judged, tables
from benchmarks.planned.spaces import DENSE, TINY, FiniteSpace, kept, points
from piper_autotune import tune


def test_the_committed_table_has_a_finite_space() -> None:
    entries = tables.read(tables.path_of(DENSE))
    assert len({tuple(entry.params.items()) for entry in entries}) == len(entries) == 20_296
    best = min((e for e in entries if e.rule == tables.SCORED), key=lambda e: e.period_s or 0.0)
    assert best.period_s == tables.least(entries) and (best.device_bytes or 0) < 80 << 30
    bounds = [e.period_s for e in entries if e.rule == "slower"]
    assert bounds and all(bound is not None and bound > best.period_s for bound in bounds)


@pytest.mark.long
def test_a_search_is_judged_by_a_table() -> None:
    of, entries = kept(TINY), tables.read(tables.path_of(TINY))
    assert isinstance(of.space, FiniteSpace)
    assert [params for params, _ in points(of.space)] == [entry.params for entry in entries]
    median, tail, bad, wrong = judged.regrets(TINY, 2, 40)
    assert 0 <= median.value <= tail.value < 0.5 and bad.met and wrong.met
    best = min((e for e in entries if e.rule == tables.SCORED), key=lambda e: e.period_s or 0.0)
    assert best.period_s is not None
    again = tables.outcomes(of, [(best.params, of.space(judged.Chosen(best.params)))], 1.0)
    assert next(iter(again)) == best, "scored again, it has the same number"
    study = tune(of.problem, of.space, trials=1, workers=0, rescore=False, **of.more)
    gap, cells = judged.judged("tiny", TINY, of, study)
    assert gap.value > 0 and not cells.met, "one candidate is not enough"
