"""A plan as tables says what its instructions by name say: peaks, timing, and the plan itself after it was sent."""

from __future__ import annotations

import pickle
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.compiler.tests.compile_cases import (
    SCHEDULES,
    RandomProgram,
    frozen_first,
    layered,
    random_case,
)
from piper_compiler import Lowered, Options, Strategy, Training, compile_program, recipes
from piper_compiler.passes.steps import templates
from piper_ir.fold.memory import with_peaks
from piper_ir.fold.timing import prepare
from piper_ir.ground.mesh import Mesh
from piper_ir.plan.instr_table import InstrTable
from piper_ir.plan.plan import Plan
from piper_ir.program.program import Program


def by_name(plan: Plan) -> Plan:
    """The plan with nothing but instructions by name, and the peaks of those."""
    roles = tuple(
        [
            replace(r, program=tuple(r.program), peak_bytes=0, peak_at=0, peak_by_category={})
            for r in plan.roles
        ]
    )
    return with_peaks(replace(plan, roles=roles, values=dict(plan.values)))


def compare(lowered: Lowered) -> None:
    plan = lowered.plan
    assert all(isinstance(role.program, InstrTable) for role in plan.roles)
    assert by_name(plan) == plan == pickle.loads(pickle.dumps(plan))
    assert lowered.prepared == prepare(plan)


@st.composite
def alike_strategies(draw: st.DrawFn) -> tuple[Program, Strategy, dict[str, Any]]:
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
        program = RandomProgram(
            draw(st.randoms(use_true_random=False)), stages, buffers=False
        ).build()
    bucket_mb = draw(st.sampled_from((25, 0.0004, 0.001)))
    training = Training(
        clip=draw(st.sampled_from((None, 1.0))), state_bytes=lambda bucket: 8 * bucket.numel
    )
    more: dict[str, Any] = {
        "training": training,
        "options": Options(draw(st.booleans()), draw(st.integers(0, 3))),
    }
    more["global_batch"] = draw(st.integers(1, 3)) * microbatches * mesh.size("dp")
    directives = (
        *recipe(pp=devices, microbatches=microbatches),
        *recipes.data_parallel(bucket_mb=bucket_mb),
    )
    return program, Strategy(mesh, directives), more


@settings(max_examples=80, deadline=None)
@given(alike_strategies())
def test_tables_say_what_their_instructions_say(
    case: tuple[Program, Strategy, dict[str, Any]],
) -> None:
    program, strategy, more = case
    compare(compile_program(program, strategy, **more))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 100_000))
def test_tables_of_random_strategies_say_what_their_instructions_say(seed: int) -> None:
    case = random_case(seed)
    compare(
        compile_program(
            case.program, case.strategy, global_batch=case.global_batch, training=case.training
        )
    )


def test_a_plan_of_many_microbatches_is_little_larger_to_send() -> None:
    few, many = (
        len(
            pickle.dumps(
                compile_program(
                    layered(8), Strategy(Mesh(pp=4), recipes.one_f_one_b(pp=4, microbatches=m))
                ).plan
            )
        )
        for m in (16, 128)
    )
    assert many < 2 * few


def test_instructions_can_be_taken_as_from_a_tuple() -> None:
    plan = compile_program(
        layered(2), Strategy(Mesh(pp=2), recipes.gpipe(pp=2, microbatches=3))
    ).plan
    program = plan.roles[0].program
    listed = tuple(program)
    assert program == listed and listed == program and program != listed[:-1]
    assert program[2:-1] == listed[2:-1] and program[-1] is listed[-1] and listed[1] in program
    with pytest.raises(IndexError):
        program[len(listed)]


def test_negative_control_a_value_that_never_dies_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that holds more than its instructions by name free is not equal to them."""
    case = RandomProgram(Random(3), 2, buffers=False)
    program, strategy = case.build(), Strategy(Mesh(pp=2), recipes.gpipe(pp=2, microbatches=4))
    good = compile_program(program, strategy).plan
    original = templates._frees
    monkeypatch.setattr(
        templates, "_frees", lambda template, traces, dying: original(template, traces, ())
    )
    assert compile_program(program, strategy).plan != good


def test_negative_control_a_table_in_another_microbatch_is_another_plan() -> None:
    lowered = compile_program(layered(2), Strategy(Mesh(pp=2), recipes.gpipe(pp=2, microbatches=3)))
    role = lowered.plan.roles[0]
    table = role.program
    assert isinstance(table, InstrTable)
    mbs = [min(mb, 1) for mb in table.mbs]
    moved = InstrTable(
        table.values,
        table.templates,
        table.used,
        mbs,
        table.waits,
        table.early,
        table.made,
        table.first,
    )
    assert moved != table
