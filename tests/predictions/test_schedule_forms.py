"""Compiler and simulator together against the closed forms of the recipes: step time, bubbles and peaks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.compiler.tests.recipe_forms import FORMS, Case
from piper_compiler import Strategy, compile_program, synthetic
from piper_ir.ground.mesh import Mesh
from piper_simulator import Simulation, simulate
from tests.helpers.cases import each_case

CASES = settings().max_examples // 25


def simulated(name: str, c: Case) -> Simulation:
    form = FORMS[name]
    program = synthetic(stages=form.stages(c), F=c.F, I=c.I, W=c.W, overlap=c.overlap)
    return simulate(compile_program(program, Strategy(Mesh(pp=c.p), form.directives(c))).plan)


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=CASES)
@given(st.data())
def test_the_simulation_has_the_closed_form(name: str, data: st.DataObject) -> None:
    form = FORMS[name]
    c = data.draw(form.cases.filter(lambda c: form.stages(c) * c.m <= 300))
    s = simulated(name, c)
    assert s.global_bubble_s == form.bubble(c)
    assert form.span is None or s.span_bubble_s == form.span(c)
    assert [split.get("activation", 0) for split in s.peak_by_category] == [
        form.peak(c, r) for r in range(c.p)
    ]


@each_case(
    ("name", "c", "step_s", "bubble"),
    [
        ("interleaved", Case(4, 8, 3, 4, 2, v=2), 171, 27),
        ("zb_h1", Case(4, 8, 3, 4, 2), 87, 15),
        ("zb_h2", Case(4, 8, 3, 4, 2), 81, 9),
        ("zbv", Case(4, 8, 1, 1, 1), 51, 3),
        ("dualpipe_v", Case(4, 10, 1, 1, 1, overlap=3), 66, 6),
        ("dualpipe", Case(8, 20, 1, 1, 1, overlap=3), 66, 6),
    ],
)
def test_the_table(name: str, c: Case, step_s: float, bubble: float) -> None:
    s = simulated(name, c)
    assert (s.step_s, set(s.bubble_s)) == (step_s, {bubble})


def test_the_pairs_of_dualpipe_take_their_given_time() -> None:
    """3(O + B - 3W) on the device with most idle."""
    alone, paired = (simulated("dualpipe_v", Case(4, 10, 2, 2, 2, overlap=o)) for o in (6, 5))
    assert (alone.global_bubble_s, paired.global_bubble_s) == (12, 9)
    assert paired.step_s < alone.step_s
