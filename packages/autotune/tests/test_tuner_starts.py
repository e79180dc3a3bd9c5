"""Protects: a search tries its starts first, and numbers without steps last."""

from __future__ import annotations

from typing import Any

import optuna

from packages.autotune.tests.tuner_spaces import points, problem, strategy
from piper_autotune import tune
from piper_autotune.searching.sampler import START, GuidedSampler
from piper_compiler import Strategy


class Begun:
    """The space of 30 points, with some that are tried first."""

    starts = tuple(points())[10:19]

    def __call__(self, trial: Any) -> Strategy:
        return strategy(trial)


def test_half_of_the_trials_are_starts_and_the_others_come_in_between() -> None:
    rows = {
        row.number: dict(row.params) for row in tune(problem(), Begun(), trials=8, workers=0).rows
    }
    assert [rows[k] for k in range(4)] == list(Begun.starts[:4])
    assert rows[5] == Begun.starts[4] and Begun.starts[5] not in rows.values(), "every third one"


class Kinds(Begun):
    """The same space, with one start that is unlike the others, behind all that a search has time for."""

    starts = (*Begun.starts, *tuple(points())[20:])

    def kind(self, start: Any) -> bool:
        return bool(start == self.starts[self.unlike])

    def __init__(self, unlike: int) -> None:
        self.unlike = unlike


def test_a_kind_without_a_start_has_one_among_the_last_trials() -> None:
    """A mesh that looks slow may come behind all the starts that a search has time for."""
    usual, searched = (
        [dict(row.params) for row in tune(problem(), Kinds(unlike), trials=12, workers=0).rows]
        for unlike in (0, -1)
    )
    at = searched.index(Kinds.starts[-1])
    assert Kinds.starts[-1] not in usual[: at + 1]
    assert searched[:at] == usual[:at] and at >= 10, "the search is the same up to then"


def test_numbers_without_steps_keep_their_values_while_others_have_neighbours() -> None:
    def loss(trial: optuna.Trial) -> float:
        chosen = [trial.suggest_categorical(name, tuple(range(6))) for name in "abc"]
        trial.suggest_float("x", 0.0, 1.0)
        return float(sum((at - 3) ** 2 for at in chosen))

    study = optuna.create_study(sampler=GuidedSampler(0))
    study.optimize(loss, n_trials=2 * START)
    values = [trial.params["x"] for trial in study.trials]
    assert set(values[START:]) <= set(values[:START]) and len(set(values[:START])) == START
    study = optuna.create_study(sampler=GuidedSampler(0))
    study.optimize(lambda trial: trial.suggest_float("x", 0.0, 1.0), n_trials=2 * START)
    assert len({trial.params["x"] for trial in study.trials}) == 2 * START
