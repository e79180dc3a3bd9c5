"""Graph and Editor: selection against brute force, immutability, one writer per value, transfers made once."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_ir.graph.graph import Graph, Node, TransferStreams
from piper_ir.graph.graph_text import format_graph
from piper_ir.ground.errors import CompileError, SelectorError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import ANY, NONE, Where
from piper_ir.ground.sizes import TensorSpec
from piper_ir.program.ops import Add, Compute
from piper_ir.program.program import Program

NAMES = ("stage", "layer", "expert", "mb")
SPEC = TensorSpec((4,), "float32")

coordinates = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3), max_size=4)
wanted = st.one_of(
    st.integers(0, 4),
    st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    st.tuples(st.integers(0, 2), st.integers(1, 3)).map(lambda p: range(p[0], p[0] + p[1])),
    st.sampled_from((ANY, NONE)),
)
selections = st.dictionaries(st.sampled_from((*NAMES, "phase", "other")), wanted, max_size=4)


def graph_of(nodes: list[tuple[dict[str, int], str]]) -> Graph:
    chunks = {f"c{k}": k for k in range(len(nodes))}
    edit = Graph(Mesh(pp=2), Program(()), {}, {}, {}, {}, chunk_index=chunks).edit()
    for k, (coords, phase) in enumerate(nodes):
        op = "compute" if k % 4 else "add"
        edit.add(
            Node(
                f"c{k}.{phase}",
                Compute(f"c{k}", "F") if k % 4 else Add(),
                {**coords, "phase": phase, "chunk": f"c{k}", "op": op},
            )
        )
    return edit.done()


def fits(value: Any, asked: Any) -> bool:
    """The meaning of a term, written again."""
    if asked == NONE:
        return value is None
    if value is None:
        return False
    return asked == ANY or value == asked or (isinstance(asked, tuple | range) and value in asked)


@given(st.lists(st.tuples(coordinates, st.sampled_from("FB")), min_size=1, max_size=14), selections)
def test_select_equals_brute_force(
    nodes: list[tuple[dict[str, int], str]], terms: dict[str, Any]
) -> None:
    graph = graph_of(nodes)
    meant = {"op": "compute", **terms}
    expected = {
        n.id
        for n in graph.nodes.values()
        if all(fits(n.coords.get(name), asked) for name, asked in meant.items())
    }
    selection = Where(**terms)
    assert {n.id for n in graph.copies(graph.find(selection))} == expected
    if expected:
        found = graph.select(selection)
        assert {n.id for n in found} == expected and len(found) == len(expected)
        assert found == sorted(found, key=graph.position)
    else:
        with pytest.raises(SelectorError, match="matches no node"):
            graph.select(selection)


@given(
    st.lists(st.tuples(coordinates, st.sampled_from("FB")), min_size=1, max_size=10),
    st.integers(0, 3),
)
def test_the_index_follows_edits(nodes: list[tuple[dict[str, int], str]], stage: int) -> None:
    """Selections that were made before an edit are not served from an old index after it."""
    graph = graph_of(nodes)
    before = {n.id for n in graph.copies(graph.find(Where(part=stage, op=ANY)))}
    edit = graph.edit()
    for k, node in enumerate(graph.nodes.values()):
        if k % 2 == 0:
            edit.update(
                Node(
                    node.id,
                    node.op,
                    {**node.coords, "part": stage},
                    node.reads,
                    node.writes,
                    node.role,
                )
            )
    edit.add(Node("new", Add(), {"part": stage, "op": "add"}))
    after = edit.done()
    assert before == set()
    assert {n.id for n in after.copies(after.find(Where(part=stage, op=ANY)))} == {
        "new",
        *list(graph.nodes)[::2],
    }
    assert {n.id for n in graph.copies(graph.find(Where(part=stage, op=ANY)))} == set()


def small() -> Graph:
    """a writes v, which b and c read."""
    edit = Graph(Mesh(pp=2), Program(()), {}, {}, {}, {}).edit()
    edit.value("v", SPEC, "activation")
    edit.add(Node("a", Add(), {"op": "add"}, (), ("v",), "pp0"))
    edit.add(Node("b", Add(), {"op": "add"}, ("v", "v"), (), "pp1"))
    edit.add(Node("c", Add(), {"op": "add"}, ("v",), (), "pp1"))
    edit.transports.update({"pp0": TransferStreams("", ""), "pp1": TransferStreams("", "in")})
    return edit.done()


def test_readers_and_writers_follow_edits() -> None:
    graph = small()
    assert graph.writer == {"v": "a"} and graph.readers == {"v": ("b", "c")}
    edit = graph.edit()
    copy = edit.transfer("v", "pp0", "pp1")
    edit.reread("b", "v", copy)
    changed = edit.done()
    assert changed.nodes["b"].reads == (copy, copy)
    assert changed.readers["v"] == ("c", "send.v#pp1") and changed.readers[copy] == ("b",)
    assert graph.readers == {"v": ("b", "c")}, "the graph it came from stays as it was"


def test_one_transfer_per_value_and_destination() -> None:
    edit = small().edit()
    assert edit.transfer("v", "pp0", "pp1") == edit.transfer("v", "pp0", "pp1") == "v#pp1"
    graph = edit.done()
    assert [n for n in graph.nodes if n.startswith(("send", "recv"))] == [
        "send.v#pp1",
        "recv.v#pp1",
    ]
    assert graph.channels["pp0>pp1.act"].streams == ("pp0>pp1.act", "in")


def test_ids_and_writers_are_unique() -> None:
    edit = small().edit()
    with pytest.raises(CompileError, match="two nodes with the id 'a'"):
        edit.add(Node("a", Add(), {}))
    with pytest.raises(CompileError, match="value 'v' has two writers: a and d"):
        edit.add(Node("d", Add(), {}, (), ("v",)))


def test_a_graph_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        small().nodes = {}  # type: ignore[misc]  # the mistake under test


def test_the_first_directive_that_orders_two_nodes_is_remembered() -> None:
    edit = small().edit()
    edit.order("b", "c")
    edit.order("b", "c")
    assert edit.done().order_edges == {(("b", -1), ("c", -1)): 0}


def test_text_is_stable_and_names_everything() -> None:
    edit = small().edit()
    edit.reread("b", "v", edit.transfer("v", "pp0", "pp1"))
    edit.order("b", "c")
    text = format_graph(edit.done())
    assert text == format_graph(edit.done())
    assert text.splitlines() == [
        "graph on Mesh(pp=2), no microbatches",
        "a           pp0              -> v",
        "b           pp1              v#pp1 v#pp1",
        "c           pp1              v            after b",
        "send.v#pp1  pp0/pp0>pp1.act  v",
        "recv.v#pp1  pp1/in           -> v#pp1",
        "channel pp0>pp1.act: pp0/pp0>pp1.act -> pp1/in",
    ]
