"""Directives by way of the graph of one microbatch give the graph that they give one by one on the whole graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.compiler.tests.compile_cases import SCHEDULES, RandomProgram, frozen_first, layered, random_case
from piper_compiler import Directive, order, partition, place, recipes, replicate, split, split_backward, stream, uniform
from piper_compiler.build import build
from piper_compiler.compile import apply_directives, one_by_one
from piper_ir.errors import PiperError
from piper_ir.graph import Graph
from piper_ir.graph_text import format_graph
from piper_ir.mesh import Mesh
from piper_ir.program import Program
from piper_ir.select import ANY, where


def tables(graph: Graph) -> tuple[object, ...]:
    """Everything of a graph, with the orders in which later passes see it."""
    orders = (list(graph.nodes), list(graph.values), list(graph.order_edges.items()), list(graph.channels), list(graph.roles))
    return format_graph(graph), *orders, dict(graph.index), dict(graph.readers), dict(graph.writer)


def both(program: Program, mesh: Mesh, directives: tuple[Directive, ...]) -> tuple[Graph, Graph]:
    graph = build(program, mesh)
    return apply_directives(graph, directives), one_by_one(graph, directives)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 100_000))
def test_random_strategies_give_the_same_graph(seed: int) -> None:
    case = random_case(seed)
    quick, plain = both(case.program, case.strategy.mesh, case.strategy.directives)
    assert tables(quick) == tables(plain), case.text


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_recipes_and_what_may_follow_them_give_the_same_graph(data: st.DataObject) -> None:
    pp, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    stages, recipe = SCHEDULES[data.draw(st.sampled_from(sorted(SCHEDULES)))]
    last = data.draw(st.sampled_from(("B", "I", "W")))
    more: list[tuple[Directive, ...]] = [
        (),
        (split_backward(where(stage=0)), replicate(where())),
        (replicate(where()),),
        (replicate(where(mb=ANY)),),
        (order(where(stage=0, mb=0, phase="F"), where(stage=0, mb=microbatches - 1, phase=last)),),
        (order(where(phase="F"), where(phase=last)), replicate(where())),
    ]
    if pp > 1:
        more.append((stream(where(op=("send", "recv")), "p2p"), replicate(where())))
    drawn = RandomProgram(data.draw(st.randoms(use_true_random=False)), pp * stages).build()
    program = data.draw(st.sampled_from((layered(8), layered(11), drawn)))
    directives = (*recipe(pp=pp, microbatches=microbatches), *data.draw(st.sampled_from(more)))
    assert outcome(apply_directives, program, Mesh(pp=pp, dp=2), directives) == outcome(
        one_by_one, program, Mesh(pp=pp, dp=2), directives
    )


def outcome(apply: Callable[..., Graph], program: Program, mesh: Mesh, directives: tuple[Directive, ...]) -> object:
    """Everything of the graph, or what is said of a directive that is not legal."""
    try:
        return tables(apply(build(program, mesh), directives))
    except PiperError as e:
        return str(e)


def test_what_one_order_may_miss_another_may_not() -> None:
    """Frozen first stages have no backward: the recipe's orders skip it, the user's order of it is refused."""
    wanted = where(stage=0, mb=0, phase="F"), where(stage=0, mb=0, phase="B")
    directives = (*recipes.gpipe(pp=2, microbatches=2), order(*wanted))
    with pytest.raises(PiperError, match="matches no node"):
        apply_directives(build(frozen_first(2), Mesh(pp=2)), directives)


def test_places_and_partition_in_any_order_give_the_same_graph() -> None:
    whole = [place(where(stage=s), on=dict(pp=s), send="s", recv="r") for s in (2, 0, 1)]
    halves = [place(where(stage=s, phase=p), on=dict(pp=s)) for p in "BF" for s in range(3)]
    for placed in (whole, halves):
        quick, plain = both(layered(6), Mesh(pp=3), (split(where(), microbatches=3), partition(stages=3), *placed))
        assert tables(quick) == tables(plain)


@pytest.mark.parametrize(
    "wrong",
    [
        (order(where(stage=0, mb=0)),),
        (order(where(stage=0, mb=7), where(stage=0, mb=0)),),
        (order(where(stage=0, mb=0), where(stage=0, mb=0)),),
        (order(where(stage=0, mb=0), where(stage=1, mb=0)),),
        (place(where(stage=0), on=dict(pp=0)),),
        (replicate(where(phase="F")),),
        (split(where(), microbatches=2),),
    ],
)
def test_an_error_is_that_of_the_whole_graph(wrong: tuple[Directive, ...]) -> None:
    graph, directives = build(layered(4), Mesh(pp=2)), (*recipes.pipeline(pp=2, microbatches=2), *wrong)
    with pytest.raises(PiperError) as plain:
        one_by_one(graph, directives)
    with pytest.raises(PiperError) as quick:
        apply_directives(graph, directives)
    assert str(quick.value) == str(plain.value)
    assert type(quick.value) is type(plain.value)


def test_a_stage_without_backward_is_skipped_by_orders_as_before() -> None:
    for recipe in (recipes.gpipe, recipes.zb_h1):  # the first stage that is trained has no I
        quick, plain = both(frozen_first(3), Mesh(pp=3), recipe(pp=3, microbatches=4))
        assert tables(quick) == tables(plain)


def test_negative_control_transfers_in_another_order_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uniform, "_is_forward", lambda *given: True)
    quick, plain = both(layered(4), Mesh(pp=2), recipes.gpipe(pp=2, microbatches=3))
    assert tables(quick) != tables(plain)
