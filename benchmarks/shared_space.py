"""Define the space in which the tuner is judged with shared states and recomputation: 5,208 strategies of a Llama.

The sampler was developed before this space was made, and without it. A model of a billion parameters is trained on 8
devices, each a node of its own, in bfloat16 with float32 parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Any

import piper
from piper import models
from piper_autotune.space.problem import Programs, TuningProblem
from piper_compiler import Strategy, recipes
from piper_ir.ground.mesh import Mesh
from piper_simulator import load_cluster

DEVICES = 8
GLOBAL_BATCH = 128
CLUSTER = "a100x1*8"
MEMORY_LIMIT = 10 << 30
MODEL = models.LlamaConfig(
    layers=16, width=2048, heads=16, kv_heads=8, hidden=5632, vocab=32_000, length=2048
)
TINY = models.LlamaConfig(layers=8, width=16, heads=2, kv_heads=1, hidden=32, vocab=64, length=8)
"""A model for the smoke test."""

PP = (1, 2, 4)
SCHEDULES = ("1f1b", "interleaved")
MICROBATCHES = {1: (4, 8, 16), 2: (8, 16), 4: (8, 16)}
KEEP = ("all", "products", "attention", "inputs")
KEEP_HALVES = ("all", "products", "inputs")
"""The policies without a pipeline, and those of the first and of the last half of the stages with one."""
BUCKET_MB = (100, 400)
RESIDENT_MB: tuple[float | str, ...] = (0, 500, "step")
REDUCED_MB: tuple[float | str, ...] = (0, "step")
PREFETCH = (1, 2)
STREAMS = ("own", "shared")


def job(config: models.DecoderConfig = MODEL) -> piper.Job:
    """Return the job, whose batch is never used."""
    return models.job(config, global_batch=GLOBAL_BATCH)


@lru_cache(maxsize=2)
def problem(config: models.DecoderConfig = MODEL) -> tuple[TuningProblem, Programs, dict[str, Any]]:
    """Return the captured model as the tuner sees it."""
    from piper.api.running.tuning import Conditions, problem_of

    made, more = problem_of(job(config), Conditions(load_cluster(CLUSTER), None, MEMORY_LIMIT))
    return made, Programs(made, more["at_rows"], more["under"]), more


def strategy(trial: Any) -> Strategy:
    """Return one of the strategies; a parameter is asked for where it has an effect."""
    pp = trial.suggest_categorical("pp", PP)
    m = trial.suggest_categorical(
        "microbatches" if pp == 1 else "microbatches_of_stages", MICROBATCHES[pp]
    )
    if pp == 1:
        stages = recipes.one_f_one_b(pp=1, microbatches=m)
        keep = [trial.suggest_categorical("keep", KEEP)]
    else:
        interleaved = trial.suggest_categorical("schedule", SCHEDULES) == "interleaved"
        stages = (recipes.interleaved if interleaved else recipes.one_f_one_b)(
            pp=pp, microbatches=m
        )
        half = pp if interleaved else pp // 2
        keep = [
            trial.suggest_categorical(name, KEEP_HALVES)
            for name in ("keep_first", "keep_last")
            for _ in range(half)
        ]
    shared = recipes.data_parallel(
        bucket_mb=trial.suggest_categorical("bucket_mb", BUCKET_MB), **_sharing(trial)
    )
    return Strategy(
        Mesh(pp=pp, dp=DEVICES // pp), (*stages, *recipes.recomputation(keep=keep), *shared)
    )


def _sharing(trial: Any) -> dict[str, Any]:
    zero = trial.suggest_categorical("zero", (0, 1, 2, 3))
    out: dict[str, Any] = {"zero": zero}
    if zero and trial.suggest_categorical("streams", STREAMS) == "shared":
        out |= {"gather": "dp", "reduce": "dp"}
    if zero >= 2:
        out["reduced_mb"] = trial.suggest_categorical("reduced_mb", REDUCED_MB)
    if zero == 3:
        out["resident_mb"] = trial.suggest_categorical("resident_mb", RESIDENT_MB)
        out["prefetch"] = trial.suggest_categorical("prefetch", PREFETCH)
    return out


def points() -> Iterator[dict[str, Any]]:
    """Yield all points of the space, in the order of the table of their scores."""
    for pp, m in [(stages, m) for stages in PP for m in MICROBATCHES[stages]]:
        if pp == 1:
            placed: list[dict[str, Any]] = [{"keep": keep} for keep in KEEP]
        else:
            each = product(SCHEDULES, KEEP_HALVES, KEEP_HALVES)
            placed = [
                {"schedule": s, "keep_first": first, "keep_last": last} for s, first, last in each
            ]
        for stages, mb, sharing in product(placed, BUCKET_MB, _sharings()):
            yield {
                "pp": pp,
                "microbatches" if pp == 1 else "microbatches_of_stages": m,
                **stages,
                "bucket_mb": mb,
                **sharing,
            }


def _sharings() -> Iterator[dict[str, Any]]:
    yield {"zero": 0}
    for zero, streams in product((1, 2, 3), STREAMS):
        both = {"zero": zero, "streams": streams}
        for reduced in REDUCED_MB if zero >= 2 else (None,):
            some = both if reduced is None else {**both, "reduced_mb": reduced}
            for resident, prefetch in (
                product(RESIDENT_MB, PREFETCH) if zero == 3 else ((None, None),)
            ):
                yield (
                    some
                    if prefetch is None
                    else {**some, "resident_mb": resident, "prefetch": prefetch}
                )
