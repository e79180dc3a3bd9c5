"""Recipes: makespans and peaks of GPipe and 1F1B, frozen stages, data parallelism and their composition."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packages.compiler.tests.canonical import canonical_durations, makespan
from packages.compiler.tests.compile_cases import frozen_first, layered
from packages.compiler.tests.plan_walk import walk
from piper_compiler import Directive, Strategy, compile_program, order, recipes, synthetic
from piper_ir.fold.timing import prepare, sweep
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.mesh import Mesh
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Collective, Compute
from piper_ir.program.program import Program
from piper_ir.verify import verify
from tests.helpers.cases import each_case


def planned(program: Program, directives: tuple[Directive, ...], **mesh: int) -> Plan:
    return compile_program(program, Strategy(Mesh(**mesh), directives)).plan


SIZES = st.tuples(
    st.integers(2, 8), st.integers(1, 12), st.integers(1, 5), st.integers(1, 5), st.integers(0, 5)
)


@settings(max_examples=60)
@given(SIZES, st.sampled_from((0, 1, 2.5)))
@example((4, 8, 3, 4, 2), 0)  # the values of the table of schedules
@example((8, 1, 3, 4, 2), 1)  # fewer microbatches than devices
def test_gpipe(sizes: tuple[int, int, int, int, int], hop: float) -> None:
    p, m, f, i, w = sizes
    plan = planned(
        synthetic(stages=p, F=f, I=i, W=w, hop=hop), recipes.gpipe(pp=p, microbatches=m), pp=p
    )
    assert makespan(plan) == (m + p - 1) * (f + i + w) + 2 * (p - 1) * hop
    assert [r.peak_bytes for r in plan.roles] == [m] * p


@settings(max_examples=60)
@given(SIZES)
@example((4, 8, 3, 4, 2))
@example((8, 3, 3, 4, 2))
def test_1f1b(sizes: tuple[int, int, int, int, int]) -> None:
    p, m, f, i, w = sizes
    plan = planned(
        synthetic(stages=p, F=f, I=i, W=w), recipes.one_f_one_b(pp=p, microbatches=m), pp=p
    )
    assert makespan(plan) == (m + p - 1) * (f + i + w)
    assert [r.peak_bytes for r in plan.roles] == [min(m, p - r) for r in range(p)]


@each_case(("hop", "expected"), [(0, 99), (1, 115), (2.5, 139)])
def test_1f1b_with_latency(hop: float, expected: float) -> None:
    plan = planned(
        synthetic(stages=4, F=3, I=4, W=2, hop=hop), recipes.one_f_one_b(pp=4, microbatches=8), pp=4
    )
    assert makespan(plan) == expected


@settings(max_examples=60)
@given(st.lists(st.tuples(*[st.integers(1, 6)] * 3), min_size=2, max_size=7), st.integers(1, 10))
def test_gpipe_with_uneven_stages(times: list[tuple[int, int, int]], m: int) -> None:
    p = len(times)
    f, b = [t[0] for t in times], [t[1] + t[2] for t in times]
    program = synthetic(stages=p, F=f, I=[t[1] for t in times], W=[t[2] for t in times])
    plan = planned(program, recipes.gpipe(pp=p, microbatches=m), pp=p)
    assert makespan(plan) == sum(f) + sum(b) + (m - 1) * (max(f) + max(b))


@settings(max_examples=40)
@given(SIZES)
def test_the_default_order_is_as_good_as_1f1b_on_a_chain(
    sizes: tuple[int, int, int, int, int],
) -> None:
    p, m, f, i, w = sizes
    plan = planned(synthetic(stages=p, F=f, I=i, W=w), recipes.pipeline(pp=p, microbatches=m), pp=p)
    assert [r.peak_bytes for r in plan.roles] == [min(m, p - r) for r in range(p)]
    assert makespan(plan) == (m + p - 1) * (f + i + w)


def test_activation_bytes_scale_the_peak() -> None:
    program = synthetic(stages=3, F=1, I=1, W=1, activation=[10, 20, 40])
    plan = planned(program, recipes.one_f_one_b(pp=3, microbatches=6), pp=3)
    assert [r.peak_bytes for r in plan.roles] == [30, 40, 40]


@each_case("frozen", [1, 2])
@each_case("recipe", [recipes.gpipe, recipes.one_f_one_b, recipes.pipeline])
def test_frozen_first_stages(recipe, frozen: int) -> None:  # type: ignore[no-untyped-def]  # three recipes of one signature
    plan = planned(frozen_first(4, frozen), recipe(pp=4, microbatches=6), pp=4)
    verify(plan)
    steps = {
        p.op.step
        for p in (p for i in plan.roles[0].program for p in i.parts)
        if isinstance(p.op, Compute)
    }
    assert steps == {"F"}
    assert walk(plan) == {r.role: r.peak_bytes for r in plan.roles}
    assert plan.roles[0].peak_bytes == 100, "its parameters; nothing is kept for a backward"


def test_each_stage_has_one_instruction_per_phase_and_microbatch() -> None:
    plan = planned(layered(8), recipes.one_f_one_b(pp=2, microbatches=3), pp=2)
    compute = [i for r in plan.roles for i in r.program if isinstance(i.parts[-1].op, Compute)]
    assert len(compute) == 2 * 3 * 2


def test_recipes_say_their_stages() -> None:
    numbers = {"pp": 2, "microbatches": 4}
    stages = {
        name: recipes.stages_of(getattr(recipes, name)(**numbers))
        for name in ("gpipe", "one_f_one_b", "zb_h1", "interleaved", "zbv", "dualpipe_v")
    }
    assert list(stages.values()) == [2, 2, 2, 4, 4, 4]
    assert recipes.stages_of(recipes.data_parallel()) is None


def test_recipes_compose_with_data_parallelism() -> None:
    both = (*recipes.one_f_one_b(pp=2, microbatches=4), *recipes.data_parallel())
    plan = planned(layered(4), both, pp=2, dp=3)
    verify(plan)
    assert plan.replicas == 3 and plan.global_batch == 12
    assert [len(r.ranks) for r in plan.roles] == [3, 3]
    assert {b.channel for b in plan.buckets} == {"reduce.pp0/dp.reduce", "reduce.pp1/dp.reduce"}
    before = planned(
        layered(4),
        (*recipes.data_parallel(), *recipes.one_f_one_b(pp=2, microbatches=4)),
        pp=2,
        dp=3,
    )
    assert before.roles == plan.roles, "the order of the two makes no difference"


def test_a_single_stage_and_microbatch_needs_no_order() -> None:
    for recipe in (recipes.gpipe, recipes.one_f_one_b):
        plan = planned(layered(2), recipe(pp=1, microbatches=1))
        verify(plan)
        assert [len(i.parts) for i in plan.roles[0].program] == [3, 5, 1], (
            "load F F; seed I W I W; update"
        )


@each_case("recipe", [recipes.gpipe, recipes.one_f_one_b, recipes.pipeline])
def test_bad_numbers(recipe) -> None:  # type: ignore[no-untyped-def]  # three recipes of one signature
    for pp, m in ((0, 1), (1, 0), (-2, 3)):
        call = rf"{recipe.__name__}\(pp={pp}, microbatches={m}\)"
        with pytest.raises(DirectiveError, match=f"{call}: both must be integers of at least 1"):
            recipe(pp=pp, microbatches=m)


def test_a_recipe_is_data_with_the_callers_line() -> None:
    directives = recipes.gpipe(pp=2, microbatches=3)
    assert all(d.site.startswith("test_recipes.py:") for d in directives)  # type: ignore[attr-defined]  # not of the protocol
    assert sum(isinstance(d, order) for d in directives) == 2


def overlapped(layers: int, seconds: float) -> tuple[Plan, list[float]]:
    """dp=2 with one layer per bucket, and durations in which a reduction takes some time."""
    plan = planned(layered(layers), (*recipes.data_parallel(bucket_mb=100 / 2**20),), dp=2)
    durations = canonical_durations(plan)
    for n, (_, _, instr) in enumerate(plan.instructions()):
        if isinstance(instr.parts[0].op, Collective):
            durations[n] = seconds
    return plan, durations


def test_12_layers_are_reduced_while_the_backward_goes_on() -> None:
    plan, durations = overlapped(12, 5.0)
    verify(plan)
    prepared = prepare(plan)
    times = sweep(prepared, durations)
    instrs = [instr for _, _, instr in plan.instructions()]
    reductions = [n for n, i in enumerate(instrs) if isinstance(i.parts[0].op, Collective)]
    backward = [
        n
        for n, i in enumerate(instrs)
        if isinstance(i.parts[-1].op, Compute) and i.parts[-1].op.step == "W"
    ]
    last_backward_ends = max(times.end[n] for n in backward)
    assert len(reductions) == 12
    assert sum(times.start[n] < last_backward_ends for n in reductions) == 11
    assert times.makespan == last_backward_ends + 5, "only the last one is exposed"


def test_reductions_take_no_stream_from_compute() -> None:
    plan, durations = overlapped(12, 0.0)
    assert sweep(prepare(plan), durations).makespan == 12 * (3 + 6)


def test_a_program_of_one_microbatch_and_hop_is_a_straight_line() -> None:
    program = replace(synthetic(stages=5, F=2, I=1, W=1), hop=3.0)
    plan = planned(program, recipes.one_f_one_b(pp=5, microbatches=1), pp=5)
    assert makespan(plan) == 5 * 4 + 2 * 4 * 3
