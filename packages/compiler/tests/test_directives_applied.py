"""Directives are applied as they are written, those of the user's own as those of Piper: in the log, in JSON, in messages."""

from __future__ import annotations

import inspect
import pickle
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from packages.compiler.tests.canonical import makespan
from packages.compiler.tests.compile_cases import layered
from packages.compiler.tests.test_directives import BOTH, applied, refused
from piper_compiler import (
    Strategy,
    compile_program,
    directive,
    fail,
    order,
    partition,
    replicate,
    site_field,
    split,
    synthetic,
)
from piper_compiler.compile import apply_directives
from piper_compiler.recipes import RECIPES
from piper_ir.graph.graph import Graph
from piper_ir.ground.errors import CompileError, DirectiveError, PiperError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import Where, where


@directive
@dataclass(frozen=True)
class Reverse:
    """Run the microbatches of the selection from last to first. Legality: 1. the batch is split."""

    selection: Where
    phase: str = "F"
    site: str = site_field()

    def check(self, graph: Graph) -> None:
        if not graph.microbatches:
            raise fail(self, 1, "write split before it")

    def apply(self, graph: Graph) -> Graph:
        edit = graph.edit()
        turn = [
            graph.select(Where(self.selection.terms, mb=i, phase=self.phase))
            for i in reversed(range(graph.microbatches))
        ]
        for earlier, later in pairwise(turn):
            edit.order(earlier[-1].id, later[0].id)
        return edit.done()


class TestUsersDirective:
    def test_it_works(self) -> None:
        lowered = compile_program(
            layered(2), Strategy(Mesh(), (split(where(), microbatches=3), Reverse(where())))
        )
        nodes = [p.node for i in lowered.plan.roles[0].program for p in i.parts]
        assert [n for n in nodes if n.startswith("stage0.F")] == [
            "stage0.F@2",
            "stage0.F@1",
            "stage0.F@0",
        ]

    def test_it_is_in_the_log_with_its_line(self) -> None:
        line = sys._getframe().f_lineno + 1
        graph = applied(split(where(), microbatches=2), Reverse(where(layer=(0, 1)), phase="B"))
        assert (
            str(graph.log[-1])
            == f"reverse(where(layer=(0, 1)), phase='B') (test_directives_applied.py:{line})"
        )

    def test_its_condition_is_named(self) -> None:
        refused(1, Reverse(where()), says="write split before it")

    def test_json_both_ways(self) -> None:
        strategy = Strategy(
            Mesh(pp=2), (split(where(), microbatches=2), Reverse(where(layer=(0, 1)), phase="B"))
        )
        assert Strategy.loads(strategy.dumps()) == strategy

    def test_a_cycle_through_it_names_it(self) -> None:
        forward_last = order(where(mb=0, phase="F"), where(mb=1, phase="F"))
        with pytest.raises(
            CompileError, match=r"ordered by reverse\(where\(\)\) \(test_directives_applied.py"
        ):
            compile_program(
                layered(1),
                Strategy(Mesh(), (split(where(), microbatches=2), forward_last, Reverse(where()))),
            )

    def test_two_of_one_name_are_refused(self) -> None:
        with pytest.raises(DirectiveError, match="two directives are called Split"):
            directive(type("Split", (), {}))

    def test_apply_must_return_a_graph(self) -> None:
        @dataclass(frozen=True)
        class Nothing:
            def check(self, graph: Graph) -> None: ...

            def apply(self, graph: Graph) -> Graph:
                return None  # type: ignore[return-value]  # the mistake under test

        with pytest.raises(
            DirectiveError, match=r"nothing\(\): apply returned NoneType; a Graph is needed"
        ):
            applied(Nothing())


def test_the_examples_of_the_language_documents_run() -> None:
    docs = Path(__file__).resolve().parents[3] / "docs"
    pages = ("language.md", "shard.md", "precision.md")
    text = "".join((docs / page).read_text(encoding="utf-8") for page in pages)
    blocks = [b.split("```")[0] for b in text.split("```python\n")[1:]]
    assert len(blocks) == 8
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(blocks[0], "language.md", "exec"), names)
    assert compile_program(layered(4), names["strategy"], global_batch=16).plan.replicas == 2
    for block in blocks[1:]:
        exec(compile(block, "language.md", "exec"), names)
    assert names["mixture"].mesh == Mesh(pp=4, dp=2, ep=4)
    assert RECIPES.pop("one_at_a_time").make is inspect.unwrap(names["one_at_a_time"])
    own = compile_program(
        layered(4), Strategy(Mesh(pp=2), names["one_at_a_time"](pp=2, microbatches=3))
    ).plan
    assert makespan(own) == 3 * 4 * 9, "3 microbatches through 4 layers, F = 3, B = 6"
    stages = synthetic(stages=4, F=(3, 3, 4, 6), I=(3, 3, 4, 6), W=(2, 3, 3, 4), hop=0.5)
    plan = compile_program(stages, Strategy(Mesh(pp=4), names["uneven"])).plan
    assert max(role.peak_bytes for role in plan.roles) == 5
    trial = SimpleNamespace(
        suggest_categorical=lambda name, choices: choices[1],
        suggest_int=lambda name, low, high: high,
    )
    assert names["strategy"](trial).mesh == Mesh(pp=2)
    last_first = names["LastFirst"](where())
    assert last_first.site.startswith("test_directives_applied.py:")
    reverse = Reverse(where())
    steps = (split(where(), microbatches=3),)
    assert applied(*steps, last_first).order_edges == applied(*steps, reverse).order_edges


class Unordered(order):
    """A user's own class of orders, which asks for nothing."""

    def apply(self, graph: Graph) -> Graph:
        return graph


def test_an_order_of_the_users_own_class_is_pickled_as_one() -> None:
    own = Unordered(where(stage=0, phase="F", mb=0), where(stage=0, phase="F", mb=1))
    again = pickle.loads(pickle.dumps(own))
    assert (type(again), again, again.site) == (Unordered, own, own.site)
    plain = order(*own.selections)
    assert pickle.loads(pickle.dumps(plain)) == plain


def test_directives_apply_strictly_in_the_order_written() -> None:
    stage_first = (partition(stages=2), split(where(), microbatches=2), *BOTH)
    assert applied(*stage_first).roles.keys() == {"pp0", "pp1"}
    with pytest.raises(PiperError, match="There is no coordinate 'stage'"):
        applied(*BOTH, partition(stages=2))


def test_a_directive_leaves_the_graph_it_was_given_alone() -> None:
    graph = applied(partition(stages=2), split(where(), microbatches=2))
    before = (
        dict(graph.nodes),
        dict(graph.readers),
        dict(graph.index),
        dict(graph.roles),
        graph.log,
    )
    apply_directives(
        graph, (*BOTH, order(where(stage=0, mb=1), where(stage=0, mb=0)), replicate(where()))
    )
    assert (graph.nodes, graph.readers, graph.index, graph.roles, graph.log) == before
