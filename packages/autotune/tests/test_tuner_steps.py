"""Steps that follow each other: the gathers that begin a step wait for the update of the step before."""

from __future__ import annotations

import pytest

from piper_compiler import Strategy, compile_program, recipes, synthetic
from piper_ir.fold import timing
from piper_ir.fold.steady_state import step_and_period
from piper_ir.fold.timing import Prepared, after_updates, prepare, sweep
from piper_ir.ground.mesh import Mesh
from piper_simulator import run_engine
from tests.helpers.cases import each_case

GATHER, UPDATE = 7.0, 5.0


def prepared(zero: int) -> tuple[Prepared, list[float]]:
    """Two replicas, one bucket: gathers and updates that take long, everything else takes a second."""
    strategy = Strategy(
        Mesh(dp=2), (*recipes.gpipe(pp=1, microbatches=2), *recipes.data_parallel(zero=zero))
    )
    plan = compile_program(synthetic(stages=1, F=1, I=1, W=1, params=100), strategy).plan
    seconds = {"gather": GATHER, "update": UPDATE}
    names = [instr.name.partition(".")[0].partition("#")[0] for instr in plan.roles[0].program]
    return prepare(plan), [seconds.get(name, 1.0) for name in names]


@each_case("zero", [0, 1, 2])
def test_a_gather_begins_after_the_last_update(zero: int) -> None:
    dag, seconds = prepared(zero)
    first = sweep(dag, seconds)
    second = sweep(dag, seconds, after=first)
    assert len(after_updates(dag)) == (zero > 0)
    for gather, update in after_updates(dag).items():
        assert seconds[gather] == GATHER and seconds[update] == UPDATE
        assert second.start[gather] == first.end[update]
    step_s, period_s = step_and_period(dag, seconds)
    assert period_s == step_s, "the first forward needs the gather, and the gather the update"
    assert run_engine(dag, seconds, steps=2) == [first, second]


def test_negative_control_without_the_wait_the_gather_is_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dag, seconds = prepared(1)
    monkeypatch.setattr(timing, "after_updates", lambda prepared: {})
    step_s, period_s = step_and_period(dag, seconds)
    assert period_s == step_s - GATHER
