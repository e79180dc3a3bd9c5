"""A search over strategies that share states: which are one candidate, and which parameters recipes take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from packages.autotune.tests.tuner_spaces import problem
from piper_autotune import tune
from piper_compiler import Directive, Strategy, directives, load_strategy, recipes, save_strategy
from piper_compiler.directives import replicate, simplest
from piper_ir.graph.graph import Graph
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where

SHARED = dict(params=("dp",), grads=("dp",), optim=("dp",))


def strategy(trial: Any) -> Strategy:
    """Most of the 24 points differ in what has no effect: 2 + 2 + 4 plans."""
    zero = trial.suggest_categorical("zero", [0, 1, 2])
    resident = trial.suggest_categorical("resident_mb", [0, "step"])
    reduced = trial.suggest_categorical("reduced_mb", [0, "step"])
    m = trial.suggest_categorical("microbatches", [1, 2])
    shared = recipes.data_parallel(zero=zero, resident_mb=resident, reduced_mb=reduced)
    return Strategy(Mesh(pp=2, dp=2), (*recipes.one_f_one_b(pp=2, microbatches=m), *shared))


def test_candidates_that_differ_in_what_has_no_effect_are_one() -> None:
    study = tune(problem(), strategy, trials=24, workers=0)
    assert len(study.rows) == 8 and not study.rejected()
    assert len({simplest(made.directives) for made in study.strategies.values()}) == 8


def test_what_has_no_effect_is_left_out_and_nothing_else() -> None:
    def short(**arguments: Any) -> tuple[Directive, ...]:
        return simplest(recipes.data_parallel(**arguments))

    assert short(
        resident_mb="step", reduced_mb=3, prefetch=4, gather="x", reduce="y"
    ) == recipes.data_parallel(reduce="y")
    assert short(zero=1, reduced_mb=3, gather="x") == recipes.data_parallel(zero=1, gather="x")
    assert short(zero=2, resident_mb=3, reduced_mb=3) == recipes.data_parallel(zero=2, reduced_mb=3)
    for kept in (
        dict(zero=3, resident_mb=3, reduced_mb=2, prefetch=0),
        dict(shard=SHARED, resident_mb="step"),
    ):
        assert short(**kept) == recipes.data_parallel(**kept)


@dataclass(frozen=True)
class Own(replicate):
    """A user's class that applies otherwise."""

    def apply(self, graph: Graph) -> Graph:
        return graph


def test_a_class_that_applies_otherwise_is_left_as_it_is() -> None:
    assert simplest((Own(where(), resident_mb=3), replicate(where(), resident_mb=3))) == (
        Own(where(), resident_mb=3),
        replicate(where()),
    )


def test_states_shared_by_name_can_be_tuned(tmp_path: Any) -> None:
    """A dict is not hashable; the directive is."""

    def own(trial: Any) -> Strategy:
        over = ("dp", "rep")[: trial.suggest_int("axes", 1, 2)]
        shared = recipes.data_parallel(
            over=("dp", "rep"), shard=dict.fromkeys(("grads", "optim"), over)
        )
        return Strategy(Mesh(dp=2, rep=2), (*recipes.gpipe(pp=1, microbatches=2), *shared))

    study = tune(problem(), own, trials=2, workers=0)
    assert [row.state for row in study.rows] == ["complete", "complete"]
    assert study.best is not None
    save_strategy(study.best, tmp_path / "best.json")
    again = load_strategy(tmp_path / "best.json")
    assert again == study.best and hash(again.directives[-1]) == hash(study.best.directives[-1])


def test_recomputation_takes_a_policy_per_stage() -> None:
    made = recipes.recomputation(keep=["inputs", "all", "products", "inputs"], group=2)
    assert made == (
        directives.recompute(where(stage=(0, 3)), keep="inputs", group=2),
        directives.recompute(where(stage=1), keep="all"),
        directives.recompute(where(stage=2), keep="products", group=2),
    )
    with pytest.raises(
        DirectiveError, match=r"recomputation\(keep='inputs'\): a policy for each stage is needed"
    ):
        recipes.recomputation(keep="inputs")
