"""The space with shared states in which the tuner is judged: its committed table, and a few of its points anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from optuna.trial import FixedTrial

from benchmarks import tuner
from piper_autotune.scoring.evaluators import Here
from piper_autotune.scoring.scoring import Scored


@pytest.mark.long
def test_the_tuner_is_judged_with_shared_states_by_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tuner, "TRIALS", 4)
    monkeypatch.setattr(tuner.space, "PP", (1,))
    monkeypatch.setattr(tuner.space, "MICROBATCHES", {1: (8,)})
    monkeypatch.setattr(tuner.space, "KEEP", ("all",))
    monkeypatch.setattr(tuner.space, "BUCKET_MB", (100,))
    monkeypatch.setattr(tuner.space, "RESIDENT_MB", ("step",))
    problem, programs, more = tuner.space.problem(replace(tuner.space.TINY, layers=2))
    points = list(tuner.space.points())
    strategies = [tuner.space.strategy(FixedTrial(point)) for point in points]
    assert len(set(strategies)) == len(points) == 1 + 2 + 4 + 8
    here = Here(problem, programs)
    found = [here.result(here.submit(strategy)) for strategy in strategies]
    scores = [(o.period_s, o.device_bytes) for o in found if isinstance(o, Scored)]
    tuner.write(tmp_path / "table.csv.gz", scores)
    again = tuner.read(tmp_path / "table.csv.gz")
    assert [nbytes for _, nbytes in again] == [nbytes for _, nbytes in scores]
    outcomes = {
        s: tuner.outcome(problem, *score) for s, score in zip(strategies, again, strict=True)
    }
    assert tuner.rate(problem, programs, strategies).value > 0
    (sample,) = tuner.sampled(problem, programs, outcomes, 2)
    (pruned,) = tuner.pruned(problem, programs, outcomes, 8)
    regret, _, bad = tuner.regrets(problem, more, outcomes, 1)
    assert sample.value < 1e-8 and pruned.met and bad.met and regret.value >= 0
    wrong = {s: replace(o, period_s=2 * o.period_s) for s, o in outcomes.items()}
    (sample,) = tuner.sampled(problem, programs, wrong, 2)
    assert sample.value == pytest.approx(0.5), "another table is seen"


def test_the_committed_table_has_the_space_with_shared_states() -> None:
    points = list(tuner.space.points())
    assert len(tuner.read(tuner.SCORES)) == len(points) == 5208
    assert len({tuple(point.items()) for point in points}) == len(points)
