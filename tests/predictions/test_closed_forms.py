"""Compiler and simulator together against closed forms: makespan, bubbles and peaks of GPipe and 1F1B.

F, I, W: seconds per stage and microbatch, B = I + W, c: seconds of a hop; p devices, m microbatches. Sources: Huang et
al. 2019 (GPipe, arXiv 1811.06965), Narayanan et al. 2021 (1F1B, arXiv 2104.04473).
"""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_compiler import Strategy, compile_program, recipes, recompute, synthetic
from piper_compiler.directives import Directive
from piper_ir.fold.issue import issue_times
from piper_ir.fold.timing import prepare, sweep
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.plan.plan import Plan
from piper_ir.program.costs import CommDuration, Costs, Duration
from piper_ir.verify import verify
from piper_simulator import simulate
from piper_simulator.times.engine import run_engine
from tests.helpers.cases import each_case

EXAMPLES = settings().max_examples // 4
Recipe = Callable[..., tuple[Directive, ...]]
Seconds = float | Sequence[float]

BOTH = pytest.mark.parametrize("recipe", [recipes.gpipe, recipes.one_f_one_b])
DEVICES = st.integers(2, 12)
MICROBATCHES = st.integers(1, 16)
TIME = st.integers(1, 9)


def pipeline(
    recipe: Recipe,
    p: int,
    m: int,
    times: tuple[Seconds, Seconds, Seconds],
    hop: float = 0.0,
    dp: int = 1,
) -> Plan:
    forward, inputs, weights = times
    program = synthetic(stages=p, F=forward, I=inputs, W=weights, params=8, hop=hop)
    directives = recipe(pp=p, microbatches=m) + (recipes.data_parallel() if dp > 1 else ())
    return compile_program(program, Strategy(Mesh(pp=p, dp=dp), directives)).plan


gpipe = partial(pipeline, recipes.gpipe)
one_f_one_b = partial(pipeline, recipes.one_f_one_b)


def activations(plan: Plan) -> list[int]:
    """Peak of each device in units of what one stage keeps for one microbatch (here one byte)."""
    return [split.get("activation", 0) for split in simulate(plan).peak_by_category]


@BOTH
@each_case("dp", [1, 2])
def test_the_table(recipe: Recipe, dp: int) -> None:
    """4 devices, 8 microbatches, F = 3, I = 4, W = 2."""
    s = simulate(pipeline(recipe, 4, 8, (3, 4, 2), dp=dp))
    assert (s.step_s, s.global_bubble_s, s.span_bubble_s) == (99.0, 27.0, 27.0)
    assert s.bubble_s == (27.0,) * 4 * dp
    peaks = [8, 8, 8, 8] if recipe is recipes.gpipe else [4, 3, 2, 1]
    assert activations(pipeline(recipe, 4, 8, (3, 4, 2), dp=dp)) == [
        n for n in peaks for _ in range(dp)
    ]


@each_case(("hop", "makespan"), [(0.0, 99.0), (1.0, 115.0), (2.5, 139.0)])
def test_1f1b_with_latency(hop: float, makespan: float) -> None:
    """Pure latency, receives posted early: transfers overlap with compute and with each other."""
    s = simulate(one_f_one_b(4, 8, (3, 4, 2), hop))
    assert s.step_s == makespan
    assert s.global_bubble_s == makespan - 72
    assert (s.exposed_comm_s > 0) == (hop > 0)


@BOTH
@given(p=DEVICES, m=MICROBATCHES, f=TIME, i=TIME, w=st.integers(0, 9))
@settings(max_examples=EXAMPLES)
def test_makespan_and_bubbles(recipe: Recipe, p: int, m: int, f: int, i: int, w: int) -> None:
    s = simulate(pipeline(recipe, p, m, (f, i, w)))
    assert s.step_s == (m + p - 1) * (f + i + w)
    assert s.bubble_s == ((p - 1) * (f + i + w),) * p
    assert s.global_bubble_s == s.span_bubble_s == (p - 1) * (f + i + w), (
        "the first device starts first and ends last"
    )
    assert s.period_s == s.step_s, "hence the next step cannot start before"
    assert s.exposed_comm_s == 0.0


@given(p=DEVICES, m=MICROBATCHES, f=TIME, i=TIME, w=TIME, hop=st.integers(0, 9))
@settings(max_examples=EXAMPLES)
def test_gpipe_with_latency(p: int, m: int, f: int, i: int, w: int, hop: int) -> None:
    assert (
        simulate(gpipe(p, m, (f, i, w), hop)).step_s
        == (m + p - 1) * (f + i + w) + 2 * (p - 1) * hop
    )


@given(st.data(), DEVICES, MICROBATCHES)
@settings(max_examples=EXAMPLES)
def test_gpipe_with_uneven_stages(data: st.DataObject, p: int, m: int) -> None:
    f, i, w = (data.draw(st.lists(TIME, min_size=p, max_size=p)) for _ in range(3))
    b = [x + y for x, y in zip(i, w)]
    s = simulate(gpipe(p, m, (f, i, w)))
    assert s.step_s == sum(f) + sum(b) + (m - 1) * (max(f) + max(b))
    assert s.bubble_s == tuple(s.step_s - m * (x + y) for x, y in zip(f, b))


@given(p=DEVICES, m=MICROBATCHES)
@settings(max_examples=EXAMPLES)
def test_peaks(p: int, m: int) -> None:
    assert activations(gpipe(p, m, (1, 1, 1))) == [m] * p
    assert activations(one_f_one_b(p, m, (1, 1, 1))) == [min(m, p - r) for r in range(p)]


@BOTH
@given(
    p=DEVICES,
    m=MICROBATCHES,
    hop=st.sampled_from([0.0, 0.3, 1.0]),
    issue=st.sampled_from([0.0, 0.05]),
    f=TIME,
)
@settings(max_examples=EXAMPLES)
def test_the_engine_equals_the_sweep(
    recipe: Recipe, p: int, m: int, hop: float, issue: float, f: int
) -> None:
    plan = pipeline(recipe, p, m, (f, 2, 1), hop)
    prepared = prepare(plan)
    durations = [0.1 + 0.01 * (n % 7) for n in range(len(prepared))]
    host = issue_times(prepared.offsets, issue)
    (times,) = run_engine(prepared, durations, latency=hop, issue=host)
    assert times == sweep(prepared, durations, latency=hop, issue=host)


@BOTH
def test_the_simulated_peak_is_the_planned_one(recipe: Recipe) -> None:
    plan = pipeline(recipe, 4, 6, (1, 1, 1), dp=2)
    s = simulate(plan)
    for rank in range(plan.mesh.world):
        role = plan.role_of(rank)
        assert (s.peak_bytes[rank], s.peak_by_category[rank]) == (
            role.peak_bytes,
            role.peak_by_category,
        )
        curve = [m for m in s.trace.memory if m.rank == rank]
        most = next(m for m in curve if sum(m.bytes.values()) == role.peak_bytes)
        assert (most.instr, most.bytes) == (role.peak_at, role.peak_by_category)


def test_negative_control_the_forms_tell_schedules_apart() -> None:
    """With latency, or in memory, GPipe and 1F1B are different schedules."""
    assert (
        simulate(gpipe(4, 8, (3, 4, 2), 1.0)).step_s
        == 105
        != simulate(one_f_one_b(4, 8, (3, 4, 2), 1.0)).step_s
    )
    assert activations(gpipe(4, 8, (3, 4, 2))) != activations(one_f_one_b(4, 8, (3, 4, 2)))


@BOTH
@given(p=st.integers(2, 6), m=st.integers(1, 8), f=TIME, r=TIME, i=TIME, w=TIME)
@settings(max_examples=EXAMPLES // 2)
def test_recomputation_is_a_longer_backward_and_one_microbatch_in_memory(
    recipe: Recipe, p: int, m: int, f: int, r: int, i: int, w: int
) -> None:
    program = synthetic(stages=p, F=f, I=i, W=w, R=r)
    directives = (*recipe(pp=p, microbatches=m), recompute(where()))
    plan = compile_program(program, Strategy(Mesh(pp=p), directives)).plan
    assert simulate(plan).step_s == (m + p - 1) * (f + r + i + w)
    assert activations(plan) == [1] * p


@BOTH
@each_case("zero", [1, 2, 3])
def test_states_that_replicas_share_cost_a_gather_before_and_a_scatter_behind(
    recipe: Recipe, zero: int
) -> None:
    """4 stages, 8 microbatches. Later stages gather in the first one's warm-up; the first stage's scatter is the last.

    With zero=3 nothing is gathered: the steps of a synthetic program read no parameters.
    """
    gather, scatter = 5.0, 7.0
    given = (
        CommDuration(op, 512, 2, Duration(s, "given"))
        for op, s in (("all_gather", gather), ("reduce_scatter", scatter))
    )
    program = synthetic(stages=4, F=3, I=4, W=2, params=512)
    shared = recipes.data_parallel(zero=zero, resident_mb="step", reduced_mb="step")
    plan = compile_program(
        program, Strategy(Mesh(pp=4, dp=2), (*recipe(pp=4, microbatches=8), *shared))
    ).plan
    verify(plan)
    assert (
        simulate(plan, costs=Costs(comm=tuple(given))).step_s
        == (gather if zero < 3 else 0) + (8 + 4 - 1) * 9 + scatter
    )
    assert simulate(plan).step_s == (8 + 4 - 1) * 9, (
        "negative control: without seconds they take none"
    )
