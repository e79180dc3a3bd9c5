"""Scoring as Ray tasks, on a Ray of this test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from optuna.trial import FixedTrial

from packages.autotune.tests.test_tuner_workers import faulty
from packages.autotune.tests.tuner_spaces import points, problem, strategy
from piper_autotune import tune
from piper_autotune.evaluators import Here
from piper_autotune.on_ray import OnRay
from piper_autotune.problem import Programs
from piper_autotune.scoring import Refused
from piper_ir.errors import TuneError


@pytest.fixture(scope="module")
def tasks() -> Iterator[OnRay]:
    of = problem()
    made = OnRay(of, Programs(of, None), "local", 20.0)
    yield made
    made.close()


def test_tasks_score_as_this_process_does(tasks: OnRay) -> None:
    of = problem()
    here = Here(of, Programs(of, None))
    some = [strategy(FixedTrial(p)) for p in list(points())[::12]]
    theirs = [tasks.submit(s) for s in some]
    assert [tasks.result(t) for t in theirs] == [here.result(here.submit(s)) for s in some]


def test_a_task_whose_worker_dies_is_an_outcome(tasks: OnRay) -> None:
    found = tasks.result(tasks.submit(faulty("exit")))
    assert isinstance(found, Refused) and found.kind == "crash" and "its Ray worker failed" in found.reason


def test_a_search_on_the_ray_that_is_there(tasks: OnRay) -> None:
    study = tune(problem(), strategy, trials=4, workers="ray")
    assert study.best is not None and len(study.rows) >= 4


def test_a_cluster_that_is_not_there_is_one_message() -> None:
    ray = pytest.importorskip("ray")
    if ray.is_initialized():
        pytest.skip("this process is on a cluster, which is then used")
    with pytest.raises(TuneError, match="no Ray cluster there"):
        tune(problem(), strategy, trials=1, workers="127.0.0.1:1")
