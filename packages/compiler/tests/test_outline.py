"""An outline has the instructions, streams, waits and peaks of the plan; where there is none, the plan is compiled."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.compiler.tests.compile_cases import SCHEDULES, RandomProgram, frozen_first, layered, random_case
from piper_compiler import Options, Strategy, Training, compile_program, outline_program, place, recipes, replicate, split, stream
from piper_compiler.passes import kinds
from piper_ir.mesh import Mesh
from piper_ir.plan import Plan
from piper_ir.program import Program
from piper_ir.select import where
from piper_ir.timing import prepare


def facts(plan: Plan) -> list[object]:
    """What is the same in an outline: everything but waits, which `prepared` has, and what parts read, write and free."""
    roles = []
    for role in plan.roles:
        program = [(i.stream, [(p.op, len(p.reads), len(p.writes)) for p in i.parts]) for i in role.program]
        first = len(role.allocs_first)
        peak = (role.peak_bytes, role.peak_at, role.peak_by_category, role.program[role.peak_at].name)
        roles.append((role.role, role.placed, role.ranks, program, role.streams, role.states, first, peak))
    bare = replace(plan, roles=(), values={})
    return [bare, roles, *([v.spec, v.category] for v in sent(plan))]


def sent(plan: Plan) -> list[Any]:
    """The values that instructions of one part read and write, in order: those of transfers, whose sizes are times."""
    return [plan.values[v] for *_, i in plan.instructions() if len(i.parts) == 1 for v in (*i.parts[0].reads, *i.parts[0].writes)]


def compare(program: Program, strategy: Strategy, **more: Any) -> Plan | None:
    found = outline_program(program, strategy, **more)
    if found is None:
        return None
    plan = compile_program(program, strategy, **more).plan
    assert facts(found.plan) == facts(plan)
    assert found.prepared == prepare(plan)
    return found.plan


@st.composite
def uniform_strategies(draw: st.DrawFn) -> tuple[Program, Strategy, dict[str, Any]]:
    """Layers, random DAGs, and frozen first stages, in every recipe that treats microbatches alike."""
    devices, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    mesh = Mesh(pp=devices, dp=draw(st.integers(1, 2)))
    each, recipe = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    stages = devices * each
    kind = draw(st.sampled_from(("layers", "random", "frozen")))
    if kind == "layers":
        seconds = [draw(st.sampled_from((1, 2, 0.3))) for _ in range(3)]
        program = layered(draw(st.integers(stages, stages + 5)), 100, *seconds)
    elif kind == "frozen":
        program = frozen_first(stages, 1) if stages > 1 else layered(2)
    else:
        program = RandomProgram(draw(st.randoms(use_true_random=False)), stages, buffers=False).build()
    bucket_mb = draw(st.sampled_from((25, 0.0004, 0.001)))
    training = Training(clip=draw(st.sampled_from((None, 1.0))), state_bytes=lambda bucket: 8 * bucket.numel)
    more: dict[str, Any] = {"training": training, "options": Options(draw(st.booleans()), draw(st.integers(0, 3)))}
    more["global_batch"] = draw(st.integers(1, 3)) * microbatches * mesh.size("dp")
    directives = (*recipe(pp=devices, microbatches=microbatches), *recipes.data_parallel(bucket_mb=bucket_mb))
    return program, Strategy(mesh, directives), more


@settings(max_examples=150, deadline=None)
@given(uniform_strategies())
def test_an_outline_equals_its_plan(case: tuple[Program, Strategy, dict[str, Any]]) -> None:
    program, strategy, more = case
    found = compare(program, strategy, **more)
    assert found is not None or program.loss_kind == "sum"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 100_000))
def test_random_strategies_have_an_outline_that_equals_the_plan_or_none(seed: int) -> None:
    case = random_case(seed)
    compare(case.program, case.strategy, global_batch=case.global_batch, training=case.training)


@pytest.mark.parametrize(
    "directives",
    [
        (*recipes.pipeline(pp=2, microbatches=2), stream(where(op=("send", "recv")), "p2p")),
        (split(where(), microbatches=2), place(where(stage=0), on=dict(pp=0))),
        (*recipes.gpipe(pp=2, microbatches=2), replicate(where(mb=0))),
        recipes.gpipe(pp=3, microbatches=2),
        (),
    ],
)
def test_there_is_no_outline_of_what_is_not_uniform_or_not_legal(directives: tuple[Any, ...]) -> None:
    assert outline_program(layered(4), Strategy(Mesh(pp=2), directives)) is None


def test_negative_control_a_value_that_never_dies_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = RandomProgram(Random(3), 2, buffers=False)
    case.loss_kind = "mean"
    program, strategy = case.build(), Strategy(Mesh(pp=2), recipes.gpipe(pp=2, microbatches=4))
    assert compare(program, strategy) is not None
    monkeypatch.setattr(kinds, "_dies_in", lambda part, chunks: [])
    with pytest.raises(AssertionError):
        compare(program, strategy)
