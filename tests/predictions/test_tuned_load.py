"""Searches under a load of experts: a bound that each step overflows is not the fastest any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import piper
from piper import Mesh, Strategy, models, recipes
from piper_ir.ground.errors import PlanError, TuneError
from piper_simulator import DeviceModel, Zipf
from tests.helpers.large_experts import LARGE, NODES


def space(trial: Any) -> Strategy:
    bound = trial.suggest_categorical("bound", [1.0, 1.25, 2.0])
    return Strategy(
        Mesh(ep=4), (*recipes.expert_parallel(bound=bound), *recipes.data_parallel(over=("ep",)))
    )


def tuned(**more: Any) -> Any:
    work = models.job(LARGE, global_batch=32, precision="bfloat16")
    return piper.tune(work, space, **{"cluster": NODES, "trials": 6, "workers": 0, **more})


@pytest.mark.long
def test_a_search_under_a_load_takes_the_bound_that_holds_it() -> None:
    best = {load: tuned(load=load).best for load in (None, 1.2, Zipf(0.9))}
    assert {load: chosen.params["bound"] for load, chosen in best.items()} == {
        None: 1.0,
        1.2: 1.25,
        Zipf(0.9): 2.0,
    }


def test_a_load_that_cannot_be_is_refused_before_the_search(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="there is no such file or folder"):
        tuned(load=tmp_path / "none.jsonl")
    with pytest.raises(TuneError, match="a cost model of your own decides itself"):
        tuned(load=1.2, model=lambda plan, cluster, costs: DeviceModel(plan, cluster, costs))


@pytest.mark.long
def test_scores_of_one_load_are_not_those_of_another(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/scores.db"
    without, under = (tuned(storage=storage, load=load).best for load in (None, 1.2))
    assert (without.params["bound"], under.params["bound"]) == (1.0, 1.25)
