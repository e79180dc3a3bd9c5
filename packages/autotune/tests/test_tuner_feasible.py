"""Searches of spaces in which little fits or little is legal: they go on towards less memory, and say what they
know."""

from __future__ import annotations

from typing import Any

import pytest

from packages.autotune.tests.tuner_spaces import problem, strategy
from piper_autotune import NothingFoundError, Study, tune
from piper_autotune.searching.search import PRUNED, UNUSABLE
from piper_compiler import Strategy, recipes
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.mesh import Mesh

LIMIT = 700
"""The bytes of a device: four plans of `sparse` fit, in 16 of its 4,096 points."""


def sparse(trial: Any) -> Strategy:
    """Most points are refused, the others hold too much, and `bucket_mb` has no effect where there is one replica."""
    pp = trial.suggest_categorical("pp", [1, 2, 4, 8])
    microbatches = trial.suggest_int("microbatches", 1, 16)
    made = [recipes.gpipe, recipes.one_f_one_b][trial.suggest_categorical("schedule", [0, 1])]
    group, bucket_mb = (
        trial.suggest_categorical("group", [*range(8)]),
        trial.suggest_categorical("bucket_mb", [1, 5, 25, 100]),
    )
    if group != 3:
        raise DirectiveError(f"no group {group}")
    replicas = recipes.data_parallel(bucket_mb=bucket_mb)
    return Strategy(Mesh(pp=pp), (*made(pp=pp, microbatches=microbatches), *replicas))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_fits_is_found_where_most_is_refused_or_too_large(seed: int) -> None:
    study = tune(problem(LIMIT), sparse, trials=60, workers=0, seed=seed)
    assert (
        study.best is not None
        and study.best.params["pp"] == 8
        and study.best.params["microbatches"] <= 2
    )


def wide(trial: Any) -> Strategy:
    """A space of 200 plans."""
    pp = trial.suggest_categorical("pp", [1, 2, 4, 8])
    return Strategy(Mesh(pp=pp), recipes.gpipe(pp=pp, microbatches=trial.suggest_int("m", 1, 50)))


def scored(study: Study) -> int:
    """Return how many trials a study has used."""
    by_rule = sum(row.kind in ("states", "buckets", "activations") for row in study.rows)
    return len(study.rows) - min(by_rule, PRUNED * 5)


def test_a_search_that_has_found_nothing_uses_its_trials_and_does_not_say_that_nothing_fits() -> (
    None
):
    with pytest.raises(
        NothingFoundError, match=r"none of the 25 candidates that were tried .* fits into 100 B"
    ) as caught:
        tune(problem(100), wide, trials=5, workers=0)
    assert scored(caught.value.study) == 5 and not caught.value.study.exhausted


def test_a_space_at_its_end_is_said_to_have_nothing_that_fits_with_a_limit_that_is_enough() -> None:
    with pytest.raises(
        NothingFoundError, match="nothing fits: none of the 27 candidates of this space"
    ) as caught:
        tune(problem(300), strategy, trials=12, workers=0)
    assert caught.value.study.exhausted and len(caught.value.study.rows) == 27, (
        "three of 30 points are plans known already"
    )


def test_what_fits_is_found_among_many_points_of_one_plan() -> None:
    """All but one of 200 points make the same plan: 50 known ones in a row are no reason to end."""

    def alike(trial: Any) -> Strategy:
        number = trial.suggest_int("number", 0, 199)
        return Strategy(Mesh(pp=8), recipes.gpipe(pp=8, microbatches=1 if number == 137 else 16))

    study = tune(problem(LIMIT), alike, trials=5, workers=0)
    assert study.best is not None and study.best.params == {"number": 137} and study.exhausted
    assert study.repeated >= 198, "198 points at least are no candidates of their own"


def test_the_sampler_is_told_how_far_from_fitting_each_candidate_is() -> None:
    """What has no plan is further away than all that has one; a repeated plan is as far as it was before."""
    import optuna

    sampler = optuna.samplers.RandomSampler(seed=1)
    storage = optuna.storages.InMemoryStorage()
    with pytest.raises(NothingFoundError):
        tune(problem(100), sparse, trials=80, workers=0, sampler=sampler, storage=storage)
    (name,) = optuna.get_all_study_names(storage)
    told = optuna.load_study(study_name=name, storage=storage).get_trials()
    refused = {trial.constraints["fits"] for trial in told if trial.params["group"] != 3}
    planned = [trial.constraints["fits"] for trial in told if trial.params["group"] == 3]
    assert refused == {UNUSABLE} and planned and all(0 < over < UNUSABLE for over in planned)
