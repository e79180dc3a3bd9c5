"""Worker processes: same scores as in this process; what crashes or hangs is one rejected row."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import pytest
from optuna.trial import FixedTrial

from packages.autotune.tests.tuner_spaces import points, problem, strategy
from piper_autotune import SearchProgress, tune
from piper_autotune.scoring import evaluators
from piper_autotune.scoring.evaluators import Here, Processes
from piper_autotune.scoring.scoring import Refused, Scored
from piper_autotune.searching import tuner
from piper_autotune.space.problem import (
    Programs,
    TuningProblem,
    Wanted,
    packed,
    packed_strategy,
)
from piper_compiler import (
    CaptureRequest,
    Strategy,
    directive,
    place,
    recipes,
    site_field,
    synthetic,
)
from piper_ir.graph.graph import Graph
from piper_ir.ground.errors import CaptureError, TuneError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.program.program import Program

TIMEOUT_S = 5.0


@directive
@dataclass(frozen=True)
class Fault:
    """Does something bad to the process that compiles it. Lives in a test file, which workers cannot import."""

    kind: str
    site: str = site_field()

    def check(self, graph: Graph) -> None: ...

    def apply(self, graph: Graph) -> Graph:
        if self.kind == "exit":
            os._exit(3)
        if self.kind == "abort":
            os.abort()
        if self.kind == "hang":
            time.sleep(3600)
        if self.kind == "raise":
            raise RuntimeError("as asked")
        if self.kind == "torch":
            import sys

            raise RuntimeError(f"torch {'torch' in sys.modules}, optuna {'optuna' in sys.modules}")
        return graph


def faulty(kind: str) -> Strategy:
    return Strategy(Mesh(), (*recipes.gpipe(pp=1, microbatches=2), Fault(kind)))


@pytest.fixture(scope="module")
def pool() -> Iterator[Processes]:
    of = problem()
    made = Processes(of, Programs(of, None), 2, TIMEOUT_S)
    yield made
    made.close()


def test_workers_score_as_this_process_does(pool: Processes) -> None:
    of = problem()
    here = Here(of, Programs(of, None))
    some = [strategy(FixedTrial(p)) for p in list(points())[::7]]
    ours = [here.submit(s, engine=bool(k % 2)) for k, s in enumerate(some)]
    theirs = [pool.submit(s, engine=bool(k % 2)) for k, s in enumerate(some)]
    assert [pool.result(t) for t in theirs] == [here.result(t) for t in ours]


@pytest.mark.parametrize(
    ("kind", "outcome", "text"),
    [
        ("exit", "crash", "its worker process ended with exit code 3"),
        ("abort", "crash", "its worker process ended with signal 6"),
        ("hang", "hang", "it took longer than 5 s"),
        ("raise", "illegal", "compiling it raised RuntimeError: as asked"),
    ],
)
def test_a_fault_is_an_outcome_and_the_workers_go_on(
    pool: Processes, kind: str, outcome: str, text: str
) -> None:
    good = strategy(FixedTrial(next(points())))
    before, bad, after = pool.submit(good), pool.submit(faulty(kind)), pool.submit(good)
    found = pool.result(bad)
    assert isinstance(found, Refused) and found.kind == outcome and text in found.reason
    assert isinstance(pool.result(before), Scored) and isinstance(pool.result(after), Scored)


def test_workers_need_neither_torch_nor_optuna(pool: Processes) -> None:
    found = pool.result(pool.submit(faulty("torch")))
    assert isinstance(found, Refused) and "torch False, optuna False" in found.reason


def test_a_search_survives_its_candidates() -> None:
    def some(trial: Any) -> Strategy:
        kind = trial.suggest_categorical("kind", ["exit", "raise", "none", "fine"])
        return (
            faulty(kind)
            if kind != "fine"
            else Strategy(Mesh(), recipes.gpipe(pp=1, microbatches=2))
        )

    study = tune(problem(), some, trials=4, workers=2)
    assert sorted(str(r["kind"]) for r in study.rejected()) == ["crash", "illegal"]
    assert len(study.table()) == 2 and study.best is not None


def test_as_many_workers_as_wanted_and_the_same_seed_are_the_same_study() -> None:
    first, second = (tune(problem(), strategy, trials=12, workers=2) for _ in range(2))
    assert first == second


def test_other_programs_reach_the_workers_when_they_are_asked_for() -> None:
    made = synthetic(stages=1, F=1, I=1, W=1)
    slow = replace(made, chunks=synthetic(stages=1, F=5, I=5, W=5).chunks)

    def at_rows(rows: int) -> Program:
        if rows == 3:
            raise CaptureError("the model has no way with 3 rows")
        return slow if rows == 1 else made

    of = TuningProblem(made, global_batch=6)
    two = Processes(of, Programs(of, at_rows), 1, TIMEOUT_S)
    try:
        tickets = [
            two.submit(Strategy(Mesh(), recipes.gpipe(pp=1, microbatches=m))) for m in (1, 6, 2, 6)
        ]
        whole, ones, threes, again = (two.result(t) for t in tickets)
    finally:
        two.close()
    assert isinstance(whole, Scored) and isinstance(ones, Scored) and again == ones
    assert (whole.step_s, ones.step_s) == (3, 6 * 15)
    assert isinstance(threes, Refused) and threes.reason == "the model has no way with 3 rows"


def test_a_worker_that_cannot_start_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluators.sys, "executable", "/bin/false")
    of = problem()
    broken = Processes(of, Programs(of, None), 1, TIMEOUT_S)
    with pytest.raises(TuneError, match="a worker process ended while it started"):
        broken.result(broken.submit(strategy(FixedTrial(next(points())))))
    broken.close()


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(TuneError, match="cannot send a generator to worker processes"):
        packed(x for x in range(3))


def test_what_a_script_defines_travels_with_its_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = IntEnum("Stages", ["FIRST", "SECOND"], module="__main__", start=0)
    monkeypatch.setattr(sys.modules["__main__"], "Stages", stages, raising=False)
    made = Strategy(Mesh(pp=2), (place(where(stage=stages(1)), on=dict(pp=1)),))
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).directives[0].selection)"
    told = subprocess.run(
        [sys.executable, "-c", code], input=packed_strategy(made), capture_output=True, check=True
    )
    assert b"where(stage=<Stages.SECOND: 1>)" in told.stdout
    odd = Strategy(Mesh(), (), params={"chosen": lambda: 7})  # for the record, whatever it is
    assert pickle.loads(packed_strategy(odd)).params["chosen"]() == 7


def test_workers_are_ended_before_an_interrupted_study_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What remains to be done then is small: a strategy whose stages do not depend on costs is not compiled again."""
    started: list[subprocess.Popen[bytes]] = []
    start = evaluators._start

    def noted(blob: bytes) -> Any:
        made = start(blob)
        started.append(made.process)
        return made

    def interrupt(now: SearchProgress) -> None:
        if now.best is not None:
            raise KeyboardInterrupt

    def compiled_again(*given: Any, **more: Any) -> None:
        raise AssertionError("nothing is compiled after Ctrl-C")

    def studied(*given: Any) -> Any:
        assert started and all(process.poll() is not None for process in started), (
            "its workers still compute"
        )
        return made_study(*given)

    made_study = tuner._study
    monkeypatch.setattr(evaluators, "_start", noted)
    monkeypatch.setattr(tuner, "compile_program", compiled_again)
    monkeypatch.setattr(tuner, "_study", studied)
    study = tune(problem(), strategy, trials=12, workers=2, progress=interrupt)
    assert study.interrupted and study.best is not None


def test_workers_that_were_started_end_when_the_next_one_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = evaluators._start

    def interrupted(blob: bytes) -> Any:
        if started:
            raise KeyboardInterrupt
        made = start(blob)
        started.append(made.process)
        return made

    monkeypatch.setattr(evaluators, "_start", interrupted)
    of = problem()
    with pytest.raises(KeyboardInterrupt):
        Processes(of, Programs(of, None), 2, TIMEOUT_S)
    assert started[0].poll() is not None


def test_no_process_is_left_behind() -> None:
    of = problem()
    made = Processes(of, Programs(of, None), 2, TIMEOUT_S)
    processes = [w.process for w in made._workers]
    made.submit(faulty("hang"))
    made.close()
    assert all(p.poll() is not None for p in processes)


def test_a_worker_gets_the_programs_that_it_asks_for_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker is not sent the programs of bounds: there are many, and each takes it long to read."""
    sent: list[set[Wanted]] = []
    monkeypatch.setattr(
        evaluators.pickle,
        "dumps",
        lambda item: sent.append(set(item[2])) or pickle._dumps(item),
    )
    of = TuningProblem(synthetic(stages=1, F=1, I=1, W=1), global_batch=6)
    programs = Programs(of, lambda rows: of.program)
    other = CaptureRequest(policies=("inputs",))
    for wanted in (Wanted(2), Wanted(6, other), Wanted(6, alone=True)):
        programs.add(wanted)
    pool = Processes(of, programs, 1, TIMEOUT_S)
    try:
        found = pool.result(pool.submit(Strategy(Mesh(), recipes.gpipe(pp=1, microbatches=1))))
    finally:
        pool.close()
    assert isinstance(found, Scored)
    assert sent == [set(), {Wanted(2), Wanted(6)}]
