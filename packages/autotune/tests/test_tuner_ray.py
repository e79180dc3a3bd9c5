"""Scoring as Ray tasks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from optuna.trial import FixedTrial

from packages.autotune.tests.test_tuner_workers import faulty
from packages.autotune.tests.tuner_spaces import points, problem, strategy
from piper_autotune import tune
from piper_autotune.scoring.evaluators import Here
from piper_autotune.scoring.on_ray import OnRay, task
from piper_autotune.scoring.scoring import Refused
from piper_autotune.space.problem import Programs
from piper_ir.ground.errors import TuneError
from piper_runtime.launch.ray.ray_cluster import connect


def test_a_process_without_ray_is_told_so() -> None:
    import ray

    if ray.is_initialized():
        pytest.skip("another test of this process has connected it")
    with pytest.raises(TuneError, match="not connected to a Ray cluster"):
        tune(problem(), strategy, trials=1, workers="ray")


@pytest.fixture(scope="module")
def tasks(ray_address: str) -> Iterator[OnRay]:
    link, of = connect(ray_address, 2), problem()
    made = OnRay(of, Programs(of, None), 120.0)
    yield made
    made.close()
    link.close()


def test_tasks_score_as_this_process_does(tasks: OnRay) -> None:
    of = problem()
    here = Here(of, Programs(of, None))
    some = [strategy(FixedTrial(p)) for p in list(points())[::12]]
    theirs = [tasks.submit(s) for s in some]
    assert [tasks.result(t) for t in theirs] == [here.result(here.submit(s)) for s in some]


def test_a_task_whose_worker_dies_is_an_outcome(tasks: OnRay) -> None:
    found = tasks.result(tasks.submit(faulty("exit")))
    assert (
        isinstance(found, Refused)
        and found.kind == "crash"
        and "its Ray worker failed" in found.reason
    )


def test_the_task_that_is_waited_for_is_cancelled_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C while a result is waited for, in a Ray that stays: nothing of the search goes on computing there."""

    class StubRay:
        exceptions = SimpleNamespace(GetTimeoutError=TimeoutError, RayError=OSError)
        cancelled: ClassVar[list[str]] = []

        def __init__(self) -> None:
            self.sent = 0

        def remote(self, *given: object) -> Any:
            self.sent += 1
            return self if given[0] is task else f"task {self.sent}"

        def get(self, ref: str, timeout: float) -> None:
            raise KeyboardInterrupt

        def cancel(self, ref: str, force: bool) -> None:
            self.cancelled.append(f"{ref} {force}")

        is_initialized = options = lambda self, **_: self
        cluster_resources = lambda self: {"CPU": 1}  # noqa: E731 - a stub of one line
        put = lambda self, blob: SimpleNamespace(binary=lambda: b"")  # noqa: E731 - a stub of one line

    monkeypatch.setitem(sys.modules, "ray", StubRay())
    of = problem()
    made = OnRay(of, Programs(of, None), 1.0)
    first, _ = (made.submit(strategy(FixedTrial(p))) for p in list(points())[:2])
    with pytest.raises(KeyboardInterrupt):
        made.result(first)
    made.close()
    assert [text.split()[2] for text in StubRay.cancelled] == ["True", "True"]


def test_a_search_on_the_ray_that_is_there(tasks: OnRay) -> None:
    study = tune(problem(), strategy, trials=3, workers="ray")
    assert study.best is not None and len(study.rows) >= 3
