"""Directives that take a graph over give what they give on a copy, and never touch the graph that the caller holds."""

from __future__ import annotations

from piper_compiler import recipes, synthetic
from piper_compiler.build import build
from piper_compiler.compile import apply_directives
from piper_ir.graph_text import format_graph
from piper_ir.mesh import Mesh


def test_taking_over_changes_no_result_and_no_graph_of_the_callers() -> None:
    directives = recipes.one_f_one_b(pp=3, microbatches=4)
    graph = build(synthetic(stages=3, F=1, I=1, W=1), Mesh(pp=3))
    before = format_graph(graph)
    copied = graph
    for item in directives:
        copied = item.apply(copied)
    partly = apply_directives(graph, directives[:3])
    shown = format_graph(partly)
    taken = apply_directives(partly, directives[3:])
    assert format_graph(taken, log=False) == format_graph(copied, log=False)
    assert format_graph(graph) == before
    assert format_graph(partly) == shown


def test_negative_control_a_graph_that_was_handed_over_changes() -> None:
    graph = build(synthetic(stages=2, F=1, I=1, W=1), Mesh(pp=2))
    before = format_graph(graph)
    recipes.pipeline(pp=2, microbatches=1)[2].apply(graph.hand_over())
    assert format_graph(graph) != before
