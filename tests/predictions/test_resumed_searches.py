"""A search in a storage goes on only where an earlier one asked the same: the same strategies, of the same cost
model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import piper
from piper_autotune import TuningProblem
from piper_autotune import tune as search
from piper_ir.ground.errors import TuneError
from piper_ir.plan.plan import Instr, RolePlan

PROGRAM = piper.synthetic(stages=2, F=1.0, I=1.0, W=1.0, params=64)
SECONDS = 1.0


class Rate(piper.CostModel):
    def __init__(self, plan: Any, cluster: Any, costs: Any, table: dict[str, float]) -> None:
        self.seconds = table["a"] + table["b"] / plan.microbatches**3

    def work(self, role: RolePlan, instr: Instr) -> piper.Work:
        return piper.Work(0.0 if instr.comm else self.seconds, "formula")


class Factory:
    def __init__(self, **table: float) -> None:
        self.table = table

    def __call__(self, plan: Any, cluster: Any, costs: Any) -> Rate:
        return Rate(plan, cluster, costs, self.table)


def by_closure(**table: float) -> Callable[..., Rate]:
    return lambda plan, cluster, costs: Rate(plan, cluster, costs, table)


def by_partial(**table: float) -> Callable[..., Rate]:
    return partial(Rate, table=table)


def helper() -> float:
    return SECONDS


class ByHelper(piper.CostModel):
    def __init__(self, plan: Any, cluster: Any, costs: Any) -> None:
        pass

    def work(self, role: RolePlan, instr: Instr) -> piper.Work:
        return piper.Work(0.0 if instr.comm else helper(), "formula")


class OfAFile(ByHelper):
    def __init__(self, plan: Any, cluster: Any, costs: Any) -> None:
        self.seconds = float(Path("seconds").read_text())


def strategy(trial: Any) -> piper.Strategy:
    microbatches = trial.suggest_categorical("microbatches", [2, 4, 8, 16])
    return piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=microbatches))


def best(model: Any, storage: str, space: Any = strategy) -> tuple[int, float, int]:
    study = piper.tune(
        PROGRAM, space, cluster="h100x2", trials=4, workers=0, model=model, storage=storage
    )
    found = study.best_row
    assert found is not None and found.period_s is not None
    return found.params["microbatches"], found.period_s, len(study.rows)


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/study.db"


@pytest.mark.long
@pytest.mark.parametrize("made", [Factory, by_closure, by_partial])
def test_another_model_begins_anew(made: Callable[..., Any], storage: str, tmp_path: Path) -> None:
    constant, shrinking = made(a=1.0, b=0.0), made(a=0.0, b=10.0)
    first = best(constant, storage)
    found = best(shrinking, storage)
    assert found[:2] == best(shrinking, f"sqlite:///{tmp_path}/fresh.db")[:2] != first[:2]
    assert best(made(a=1.0, b=0.0), storage)[:2] == first[:2]


def test_a_value_that_a_helper_of_the_model_reads_counts(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = best(ByHelper, storage)
    monkeypatch.setitem(globals(), "SECONDS", 2.0)
    assert best(ByHelper, storage)[1] == pytest.approx(2 * first[1])


class Space:
    def __init__(self, stages: int) -> None:
        self.stages = stages

    def __call__(self, trial: Any) -> piper.Strategy:
        microbatches = trial.suggest_categorical("microbatches", [4, 8])
        return piper.Strategy(
            piper.Mesh(), (piper.split(piper.where(), microbatches=microbatches * self.stages),)
        )


@pytest.mark.long
def test_another_state_of_a_strategy_object_begins_anew(storage: str) -> None:
    first, second = (
        best(Factory(a=1.0, b=0.0), storage, Space(1)),
        best(Factory(a=1.0, b=0.0), storage, Space(2)),
    )
    assert (first[1], second[1]) == (9.0, 17.0), "twice as many microbatches, and the update"


def test_a_model_that_cannot_be_told_from_others_is_refused_with_a_storage(storage: str) -> None:
    with pytest.raises(
        TuneError,
        match=r"tune\(storage=\.\.\., model=OfAFile\): .*such as a file.*leave storage out",
    ):
        best(OfAFile, storage)
    with pytest.raises(TuneError, match="model=Factory"):
        search(TuningProblem(PROGRAM, model=Factory(a=1.0, b=0.0)), strategy, storage=storage)


def names(storage: str) -> set[str]:
    import optuna

    return set(optuna.get_all_study_names(storage))


SCRIPT = """
import sys
from tests.predictions.test_resumed_searches import Factory, best
best(Factory(a=1.0, b=0.5), sys.argv[1])
"""


@pytest.mark.long
def test_another_process_goes_on_with_the_same_search(storage: str) -> None:
    for _ in range(2):
        best(Factory(a=1.0, b=0.5), storage)
    here = names(storage)
    assert len(here) == 1
    subprocess.run([sys.executable, "-c", SCRIPT, storage], check=True, timeout=120)
    assert names(storage) == here


@pytest.mark.long
def test_a_strategy_whose_variable_has_no_value_yet_can_be_searched(storage: str) -> None:
    def space(trial: Any) -> piper.Strategy:
        return later(trial)

    with pytest.raises(TuneError, match="later"):
        best(Factory(a=1.0, b=0.0), storage, space)

    def later(trial: Any) -> piper.Strategy:
        return strategy(trial)

    assert best(Factory(a=1.0, b=0.0), storage, space)[0] in (2, 4, 8, 16)
