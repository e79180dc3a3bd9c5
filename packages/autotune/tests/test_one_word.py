"""What one word would change, candidates that are as good as equal, and parameters that make no difference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from piper_autotune import ScoredHere, Wanted, tune
from piper_autotune.scoring.scoring import Scored, score
from piper_autotune.scoring.single_changes import OneWord, alternatives
from piper_autotune.space.problem import TuningProblem
from piper_compiler import Strategy, partition, recipes, synthetic
from piper_ir.ground.mesh import Mesh
from piper_ir.study.study import Row
from piper_ir.study.study_groups import (
    folded,
    folded_text,
    indifferent,
    indifferent_text,
    interval_text,
)


def heavy_end(at: Any = "even") -> Strategy:
    return Strategy(Mesh(pp=4), recipes.one_f_one_b(pp=4, microbatches=8, at=at))


def uneven() -> TuningProblem:
    """Eight layers, the last as slow as four: half of the last stage's work should be elsewhere."""
    made = synthetic(
        stages=8, F=[1] * 7 + [4], I=[1] * 7 + [4], W=[1] * 7 + [4], activation=64, params=256
    )
    chunks = tuple(replace(c, coords={"layer": k}) for k, c in enumerate(made.chunks))
    return TuningProblem(replace(made, chunks=chunks))


@pytest.mark.parametrize("engine", [False, True])
def test_stages_by_cost_are_told_with_the_numbers_that_they_have(engine: bool) -> None:
    (word,) = ScoredHere(uneven(), engine=engine).one_word(heavy_end())
    assert word.words == 'partition(at="cost")' and word.helps
    before, after = (
        score(uneven(), heavy_end(at), {Wanted(1): None}, engine) for at in ("even", "cost")
    )
    assert (word.before, word.after) == (before, after)
    assert (
        word.period_change == pytest.approx(word.after.period_s / word.before.period_s - 1)
        and word.period_change < -0.1
    )
    assert f"({word.period_change * 100:+.1f} %)" in word.text


def test_nothing_is_told_of_stages_that_are_chosen_already_and_of_one_stage() -> None:
    assert not list(alternatives(heavy_end("cost"))) and not list(
        alternatives(heavy_end((2, 4, 6)))
    )
    one = Strategy(Mesh(), (partition(stages=1),))
    assert not list(alternatives(one)) and ScoredHere(uneven(), engine=False).one_word(one) == ()


def test_shared_optimizer_states_are_told_where_there_are_replicas() -> None:
    def words(dp: int, **sharing: Any) -> list[str]:
        recipe = (
            *recipes.one_f_one_b(pp=2, microbatches=2, at=(4,)),
            *recipes.data_parallel(**sharing),
        )
        return [text for text, _ in alternatives(Strategy(Mesh(pp=2, dp=dp), recipe))]

    assert words(2) == ["replicate(zero=1)"] and words(1) == [] and words(2, zero=2) == []


def test_a_strategy_that_does_not_compile_has_no_words() -> None:
    """Nine stages of eight layers."""
    assert (
        ScoredHere(uneven(), engine=False).one_word(
            Strategy(Mesh(pp=9), recipes.gpipe(pp=9, microbatches=2))
        )
        == ()
    )


def test_what_helps() -> None:
    def word(period: float, nbytes: int, *, before: str = "", after: str = "") -> OneWord:
        return OneWord(
            "w",
            Scored(1.0, 1.0, 0, 100, "sweep", before),
            Scored(period, period, 0, nbytes, "sweep", after),
        )

    assert word(0.9, 100).helps and word(0.9, 120).helps and word(1.005, 90).helps
    assert word(0.9, 130).helps and not word(0.999, 100).helps and not word(1.05, 50).helps
    assert (
        word(2.0, 100, before="too much").helps
        and word(2.0, 80, before="too much", after="too much").helps
    )
    assert word(0.5, 100, before="too much", after="too much").helps
    assert (
        not word(0.5, 101, before="too much", after="too much").helps
        and not word(0.5, 50, after="too much").helps
    )


def test_the_line_stands_beside_another_prediction_of_the_same_step() -> None:
    """Large plans are scored without contention: the change holds, and the seconds are those of the table above it."""
    before, after = (
        Scored(1.0, 1.0, 0, 100, "sweep", "too much"),
        Scored(0.9, 0.9, 0, 50, "sweep", "too much"),
    )
    word = OneWord("w", before, after)
    assert (
        word.text
        == "w: 900 ms per step (-10.0 %), 50 B on the fullest device (-50 B); it still does not fit"
    )
    assert word.told(2.0).startswith("w: 1.8 s per step (-10.0 %)")
    assert OneWord("w", before, Scored(0.9, 0.9, 0, 50, "sweep")).text.endswith("; it fits")


def test_a_search_says_it_of_its_best() -> None:
    def space(trial: Any) -> Strategy:
        trial.suggest_int("unused", 1, 3)
        return heavy_end()

    found = tune(uneven(), space, trials=3, workers=0)
    assert len(found.advice) == 1 and found.advice[0].startswith('partition(at="cost"): ')

    def chosen(trial: Any) -> Strategy:
        return heavy_end(trial.suggest_categorical("at", ["cost", "even"]))

    assert tune(uneven(), chosen, trials=4, workers=0).advice == (), "the search had it already"


def row(number: int, period: float, nbytes: int = 100, **params: Any) -> Row:
    return Row(
        number,
        "complete",
        params,
        period_s=period,
        step_s=period,
        device_bytes=nbytes,
        source="sweep",
    )


def test_equal_candidates_are_folded_into_the_best_of_them() -> None:
    rows = [
        row(0, 1.0, m=4, mb=25),
        row(1, 1.0005, m=4, mb=50),
        row(2, 1.0005, nbytes=200, m=8, mb=25),
        row(3, 1.002, m=4, mb=99),
    ]
    groups = folded(rows)
    assert [(g.best.number, [o.number for o in g.others]) for g in groups] == [
        (0, [1]),
        (2, []),
        (3, []),
    ]
    assert (
        folded_text(groups[0]) == "and 1 equal to 0.1% with mb=50" and folded_text(groups[1]) == ""
    )
    measured = replace(rows[1], measured_period_s=1.0)
    assert len(folded([replace(rows[0], value=1.0), replace(rows[1], value=2.0)])) == 2, (
        "steps of another job hold other tokens"
    )
    assert (
        len(folded([rows[0], measured])) == 2
        and len(folded([rows[0], replace(rows[1], source="engine")])) == 2
    )


def test_a_parameter_without_effect_is_named_and_one_with_effect_is_not() -> None:
    rows = [
        row(0, 1.0, m=4, mb=25),
        row(1, 1.0005, m=4, mb=50),
        row(2, 2.0, m=8, mb=25),
        row(3, 2.0, m=8, mb=50),
    ]
    assert indifferent(rows) == {"mb": 2} and "mb (2 pairs)" in indifferent_text(rows)
    assert indifferent([*rows, row(4, 1.1, m=4, mb=75)]) == {}, "one pair that differs is enough"
    assert indifferent([row(0, 1.0, m=4, mb=25), row(1, 1.0, m=8, mb=50)]) == {}, (
        "nobody knows which of the two it was"
    )
    assert indifferent_text([]) == ""


def test_candidates_within_the_interval_of_the_best_are_counted() -> None:
    rows = [row(0, 1.0, m=4), row(1, 1.09, m=8), row(2, 1.11, m=16)]
    text = interval_text(rows, rows[0], 0.1, "hopper-nemo")
    assert "best 1 s (909.1 ms to 1.1 s: 80 % of published runs of hopper-nemo" in text
    assert "1 other candidate is within it" in text
    assert "no other candidate" in interval_text(rows, rows[0], 0.05, "")
    waiting = replace(rows[0], low_s=0.7, high_s=1.4)
    text = interval_text([waiting, *rows[1:]], waiting, 0.1, "hopper-nemo")
    assert "best 1 s (700 ms to 1.4 s" in text and "2 other candidates are within it" in text
    assert interval_text(rows, rows[0], 0.0, "") == "", "durations are given"
    measured = replace(rows[0], measured_period_s=1.0)
    assert interval_text(rows, measured, 0.1, "") == ""
