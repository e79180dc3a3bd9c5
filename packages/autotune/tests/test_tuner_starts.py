"""Protects: a search tries its starts first, and numbers without steps last."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from packages.autotune.tests.tuner_spaces import points, problem, strategy
from piper_autotune import tune
from piper_autotune.searching import search
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
    """The same space with more starts; the last ones, behind all that a search has time for, are each of its kind."""

    starts = (*Begun.starts, *tuple(points())[20:])
    unlike = starts[-10:]

    def kind(self, start: Any) -> int:
        return self.unlike.index(start) if start in self.unlike else -1


def test_every_second_start_and_the_last_trials_are_of_new_kinds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mesh that looks slow may come behind all the starts that a search has time for."""

    def searched() -> list[dict[str, Any]]:
        return [dict(row.params) for row in tune(problem(), Kinds(), trials=12, workers=0).rows]

    first, unlike = Kinds.starts, Kinds.unlike
    assert searched()[:6] == [first[0], unlike[0], first[1], unlike[1], first[2], unlike[2]]
    monkeypatch.setattr(search, "LAST", 1)  # all trials are the last ones
    assert searched()[:6] == [first[0], *unlike[:5]]


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
