"""A directive in a user's file does what ours do: a copy of `place`, and one that goes microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from packages.compiler.tests.compile_cases import SCHEDULES, layered, random_case, users_place
from piper_compiler import Directive, Strategy, compile_program, order, place, recipes
from piper_compiler.directives.place import role_name
from piper_ir.graph.graph import Editor, Graph, TransferStreams
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from tests.helpers.cases import each_case


@dataclass(frozen=True)
class PlaceByName:
    """`place` on the names of single microbatches (`Graph.nodes`), as the documentation shows directives."""

    like: place

    def check(self, graph: Graph) -> None: ...

    def apply(self, graph: Graph) -> Graph:
        edit = graph.edit()
        fixed = dict(self.like.on)
        role = role_name(fixed)
        edit.roles[role] = fixed
        edit.transports[role] = TransferStreams(self.like.send, self.like.recv)
        ids = [node.id for node in graph.select(self.like.selection)]
        for id in ids:
            node = edit.nodes[id]
            edit.update(type(node)(id, node.op, node.coords, node.reads, node.writes, role))
        for id in ids:
            _connect(edit, id, role)
        return edit.done()


def _connect(edit: Editor, id: str, role: str) -> None:
    nodes, node = edit.nodes, edit.nodes[id]
    for value in node.reads:
        writer = nodes.get(edit.writer.get(value, ""))
        if writer is not None and writer.role not in ("", role):
            edit.reread(id, value, edit.transfer(value, writer.role, role))
    for value in node.writes:
        for reader in edit.readers.get(value, ()):
            if nodes[reader].role not in ("", role) and nodes[reader].coords["op"] in (
                "compute",
                "add",
            ):
                edit.reread(reader, value, edit.transfer(value, role, nodes[reader].role))


def copied(item: Directive) -> Directive:
    return (
        users_place()(item.selection, item.on, item.send, item.recv)
        if isinstance(item, place)
        else item
    )


def by_name(item: Directive) -> Directive:
    return PlaceByName(item) if isinstance(item, place) else item


@each_case("name", sorted(SCHEDULES))
def test_a_copy_of_place_in_a_users_file_gives_the_same_plan(name: str) -> None:
    each, recipe = SCHEDULES[name]
    ours = recipe(pp=2, microbatches=4)
    theirs = [copied(d) for d in ours]
    assert any(type(d).__module__ == "a_users_file" for d in theirs)
    plans = [
        compile_program(layered(2 * each + 1), Strategy(Mesh(pp=2), d)).plan for d in (ours, theirs)
    ]
    assert plans[0].key == plans[1].key


@each_case("seed", range(0, 60, 4))
def test_a_copy_of_place_by_microbatch_gives_the_same_plan(seed: int) -> None:
    case = random_case(seed)
    theirs = Strategy(case.strategy.mesh, [copied(d) for d in case.strategy.directives])
    more: Mapping[str, Any] = {"global_batch": case.global_batch, "training": case.training}
    ours = compile_program(case.program, case.strategy, **more).plan
    assert compile_program(case.program, theirs, **more).plan.key == ours.key


def test_a_place_that_goes_by_name_gives_the_same_plan() -> None:
    ours = recipes.one_f_one_b(pp=3, microbatches=3)
    plans = [
        compile_program(layered(5), Strategy(Mesh(pp=3), d)).plan
        for d in (ours, [by_name(d) for d in ours])
    ]
    assert plans[0].key == plans[1].key


def test_nodes_that_were_split_and_are_alike_again_are_one() -> None:
    graph = compile_program(
        layered(2), Strategy(Mesh(pp=2), [by_name(d) for d in recipes.gpipe(pp=2, microbatches=4)])
    ).graph
    assert all(
        len(graph.compute(chunk.id, step)) == 1
        for chunk in graph.program.chunks
        for step in ("F", "B")
    )


def test_orders_by_name_are_orders() -> None:
    """The documented way to ask for an order: ids of `select`."""

    @dataclass(frozen=True)
    class LastFirst:
        def check(self, graph: Graph) -> None: ...

        def apply(self, graph: Graph) -> Graph:
            edit = graph.edit()
            turns = [
                graph.select(where(stage=0, phase="F", mb=i))
                for i in reversed(range(graph.microbatches))
            ]
            for earlier, later in pairwise(turns):
                edit.order(earlier[-1].id, later[0].id)
            return edit.done()

    first = recipes.pipeline(pp=2, microbatches=3)
    written = order(*[where(stage=0, phase="F", mb=i) for i in (2, 1, 0)])
    plans = [
        compile_program(layered(2), Strategy(Mesh(pp=2), (*first, d))).plan
        for d in (written, LastFirst())
    ]
    assert plans[0].key == plans[1].key
