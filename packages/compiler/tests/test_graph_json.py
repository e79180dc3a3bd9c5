"""A graph survives JSON, and the plan lowered from what was read is the same plan."""

import json
from dataclasses import replace

import pytest

from piper_compiler import CompileRequest, Strategy, compile_program, recipes, synthetic
from piper_compiler.compile import lowered as lowered_from
from piper_ir.graph.graph import Graph
from piper_ir.ground.codec import dumps, loads
from piper_ir.ground.errors import FormatError
from piper_ir.ground.mesh import Mesh
from piper_ir.program.costs import Costs, Duration


def test_round_trip() -> None:
    program = synthetic(stages=2, F=1, I=1, W=1, params=512)
    strategy = Strategy(
        Mesh(pp=2, dp=2), [*recipes.one_f_one_b(pp=2, microbatches=3), *recipes.data_parallel()]
    )
    lowered = compile_program(program, strategy)
    text = dumps(lowered.graph)
    graph = loads(Graph, text)
    assert dumps(graph) == text
    assert graph == lowered.graph
    assert lowered_from(graph, 1, CompileRequest(program, strategy)).plan.key == lowered.plan.key


def test_unknown_keys_and_truncation_are_errors() -> None:
    lowered = compile_program(
        synthetic(stages=1, F=1, I=1, W=1), Strategy(Mesh(), recipes.gpipe(pp=1, microbatches=1))
    )
    text = dumps(lowered.graph)
    with pytest.raises(FormatError, match="unknown key 'colour'"):
        loads(Graph, text.replace('"microbatches"', '"colour":1,"microbatches"'))
    with pytest.raises(FormatError, match="truncated"):
        loads(Graph, text[:-2])


def test_it_is_called_a_graph_and_keeps_the_costs() -> None:
    lowered = compile_program(
        synthetic(stages=1, F=1, I=1, W=1), Strategy(Mesh(), recipes.gpipe(pp=1, microbatches=1))
    )
    costs = Costs({"stage0": {"F": Duration(2.0, "table")}}, rows=4)
    text = dumps(replace(lowered.graph, costs=costs))
    assert json.loads(text)["format"] == "Graph"
    assert loads(Graph, text).costs == costs
    with pytest.raises(FormatError, match="a Graph is expected here"):
        loads(Graph, dumps(lowered.plan))
