"""Small problems and spaces for the tests of the tuner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from optuna.trial import FixedTrial

from piper_autotune import TuningProblem, Wanted
from piper_autotune.scoring.scoring import Scored, score
from piper_compiler import Strategy, recipes, synthetic
from piper_ir.ground.mesh import Mesh
from piper_ir.program.program import Program

PP, SCHEDULES, MOST = (1, 2, 4), ("gpipe", "1f1b"), 5


@lru_cache(maxsize=1)
def program() -> Program:
    """Eight layers, the last as slow as two; a microbatch keeps 64 bytes per layer, and a layer has 256 bytes of
    parameters."""
    made = synthetic(
        stages=8, F=[1, 1, 1, 1, 1, 1, 1, 2], I=1, W=1, activation=64, params=256, hop=0.1
    )
    return replace(
        made, chunks=tuple(replace(c, coords={"layer": k}) for k, c in enumerate(made.chunks))
    )


def problem(limit: int | None = None) -> TuningProblem:
    return TuningProblem(program(), memory_limit=limit)


def strategy(trial: Any) -> Strategy:
    """30 points."""
    pp = trial.suggest_categorical("pp", PP)
    recipe = (
        recipes.gpipe
        if trial.suggest_categorical("schedule", SCHEDULES) == "gpipe"
        else recipes.one_f_one_b
    )
    return Strategy(
        Mesh(pp=pp), recipe(pp=pp, microbatches=trial.suggest_int("microbatches", 1, MOST))
    )


def points() -> Iterator[dict[str, Any]]:
    for pp in PP:
        for schedule in SCHEDULES:
            for m in range(1, MOST + 1):
                yield {"pp": pp, "schedule": schedule, "microbatches": m}


def exhaustive(
    of: TuningProblem, function: Callable[[Any], Strategy] = strategy
) -> list[tuple[Strategy, Scored]]:
    """Every point of the space with its exact score."""
    out = []
    for point in points():
        made = function(FixedTrial(point))
        found = score(of, made, {Wanted(1): None})
        assert isinstance(found, Scored)
        out.append((made, found))
    return out
