"""Every recipe against its closed form, over random numbers of the form's domain: through an executor that knows
nothing of the compiler (many cases), and through the compiler and the timing sweep (fewer)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.compiler.tests.canonical import canonical_durations
from packages.compiler.tests.order_validator import Run, execute, peaks
from packages.compiler.tests.recipe_forms import FORMS, Case, Form
from packages.compiler.tests.recipe_orders import orders_of_directives
from piper_compiler import Strategy, compile_program, synthetic
from piper_ir.fold.timing import prepare, sweep
from piper_ir.ground.mesh import Mesh
from piper_ir.plan.plan import COMPUTE, Plan
from tests.helpers.cases import each_case

CASES = settings().max_examples // 4


def planned(form: Form, c: Case, hop: float = 0.0) -> Plan:
    program = synthetic(stages=form.stages(c), F=c.F, I=c.I, W=c.W, overlap=c.overlap, hop=hop)
    return compile_program(program, Strategy(Mesh(pp=c.p), form.directives(c))).plan


def swept(plan: Plan) -> Run:
    """The times of a plan's compute that takes time."""
    prepared, seconds = prepare(plan), canonical_durations(plan)
    times = sweep(prepared, seconds, latency=plan.hop)
    run = Run([], [], [])
    for offset, role in zip(prepared.offsets, plan.roles, strict=False):
        mine = [
            offset + k
            for k, i in enumerate(role.program)
            if i.stream == COMPUTE and seconds[offset + k]
        ]
        run.start.append(times.start[mine[0]])
        run.end.append(times.end[mine[-1]])
        run.busy.append(sum(seconds[n] for n in mine))
    return run


def check(form: Form, c: Case, run: Run, units: list[int]) -> None:
    assert max(run.idle) == form.bubble(c), (c, run.idle)
    if form.span is not None:
        assert run.span == form.span(c), c
    assert units == [form.peak(c, r) for r in range(c.p)], c


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=CASES)
@given(st.data())
def test_the_order_has_its_closed_form(name: str, data: st.DataObject) -> None:
    form = FORMS[name]
    c = data.draw(form.cases)
    orders = orders_of_directives(form.directives(c))
    check(
        form,
        c,
        execute(orders, stages=form.stages(c), times=c.times, overlap=c.overlap),
        peaks(orders),
    )


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=CASES // 5)
@given(st.data())
def test_the_plan_has_its_closed_form(name: str, data: st.DataObject) -> None:
    form = FORMS[name]
    c = data.draw(form.cases.filter(lambda c: form.stages(c) * c.m <= 240))
    plan = planned(form, c)
    check(form, c, swept(plan), [r.peak_bytes for r in plan.roles])


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=CASES // 5)
@given(st.data(), st.integers(0, 5))
def test_the_plan_takes_the_time_of_its_order(name: str, data: st.DataObject, hop: int) -> None:
    """It does so outside of the form's domain as well, and with latency."""
    form = FORMS[name]
    c = data.draw(form.cases.filter(lambda c: form.stages(c) * c.m <= 240))
    few = data.draw(st.integers(1, c.m))
    c = Case(c.p, few, c.F, c.I, c.W + data.draw(st.integers(0, 9)), c.v, c.g, c.overlap)
    orders = orders_of_directives(form.directives(c))
    expected = execute(orders, stages=form.stages(c), times=c.times, overlap=c.overlap, hop=hop)
    plan = planned(form, c, hop)
    assert swept(plan).makespan == expected.makespan
    assert [r.peak_bytes for r in plan.roles] == peaks(orders)


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=CASES // 8)
@given(st.data())
def test_uneven_stages_take_the_time_of_their_order(name: str, data: st.DataObject) -> None:
    form = FORMS[name]
    c = data.draw(form.cases.filter(lambda c: form.stages(c) * c.m <= 200))
    stages, directives = form.stages(c), form.directives(c)
    f, i, w = ([data.draw(st.integers(low, 9)) for _ in range(stages)] for low in (1, 1, 0))
    expected = execute(
        orders_of_directives(directives), stages=stages, times={"F": f, "I": i, "W": w}
    )
    run = swept(
        compile_program(
            synthetic(stages=stages, F=f, I=i, W=w), Strategy(Mesh(pp=c.p), directives)
        ).plan
    )
    assert (run.makespan, run.busy, run.start) == (expected.makespan, expected.busy, expected.start)


VALUES = [
    ("gpipe", Case(4, 8, 3, 4, 2), 99, 27, 27, [8] * 4),
    ("one_f_one_b", Case(4, 8, 3, 4, 2), 99, 27, 27, [4, 3, 2, 1]),
    ("interleaved", Case(4, 8, 3, 4, 2, v=2), 171, 27, 27, [11, 9, 7, 5]),
    ("looped_bfs", Case(4, 8, 3, 4, 2, v=2), 171, 27, 27, [16] * 4),
    ("zb_h1", Case(4, 8, 3, 4, 2), 87, 15, 15, [4] * 4),
    ("zb_h2", Case(4, 8, 3, 4, 2), 81, 9, 9, [7] * 4),
    ("interleaved_zb", Case(4, 8, 3, 4, 2, v=2), 159, 15, 15, [8] * 4),
    ("zbv", Case(4, 8, 1, 1, 1), 51, 3, 0, [8] * 4),
    ("dualpipe_v", Case(4, 10, 1, 1, 1, overlap=3), 66, 6, None, [9] * 4),
    ("dualpipe", Case(8, 20, 1, 1, 1, overlap=3), 66, 6, None, [9] * 8),
]


@each_case(("name", "c", "makespan", "bubble", "span", "units"), VALUES, ids=[v[0] for v in VALUES])
def test_the_table(
    name: str, c: Case, makespan: float, bubble: float, span: float | None, units: list[int]
) -> None:
    plan = planned(FORMS[name], c)
    run = swept(plan)
    assert run.makespan == makespan
    assert run.idle == [bubble] * c.p, "on every device"
    assert span is None or run.span == span
    assert [r.peak_bytes for r in plan.roles] == units


def test_negative_control_the_forms_tell_recipes_apart() -> None:
    c = Case(4, 8, 3, 4, 2)
    with pytest.raises(AssertionError):
        check(FORMS["zb_h1"], c, swept(planned(FORMS["zb_h2"], c)), [4] * 4)
    late = Case(4, 8, 3, 4, 5)
    assert max(swept(planned(FORMS["zb_h1"], late)).idle) != FORMS["zb_h1"].bubble(late), (
        "outside of the domain it does not hold"
    )
