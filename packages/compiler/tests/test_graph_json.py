"""A graph survives JSON, and the plan lowered from what was read is the same plan."""

import pytest

from piper_compiler import Strategy, Training, compile_program, recipes, synthetic
from piper_compiler.passes.lower import Options, lower
from piper_ir.errors import FormatError
from piper_ir.graph_json import dumps_graph, loads_graph
from piper_ir.mesh import Mesh


def test_round_trip() -> None:
    program = synthetic(stages=2, F=1, I=1, W=1, params=512)
    strategy = Strategy(Mesh(pp=2, dp=2), [*recipes.one_f_one_b(pp=2, microbatches=3), *recipes.data_parallel()])
    lowered = compile_program(program, strategy)
    text = dumps_graph(lowered.graph)
    graph = loads_graph(text)
    assert dumps_graph(graph) == text
    assert graph == lowered.graph
    assert lower(graph, 1, Training(), Options()).key == lowered.plan.key


def test_unknown_keys_and_truncation_are_errors() -> None:
    lowered = compile_program(synthetic(stages=1, F=1, I=1, W=1), Strategy(Mesh(), recipes.gpipe(pp=1, microbatches=1)))
    text = dumps_graph(lowered.graph)
    with pytest.raises(FormatError, match="unknown key 'colour'"):
        loads_graph(text.replace('"microbatches"', '"colour":1,"microbatches"'))
    with pytest.raises(FormatError, match="truncated"):
        loads_graph(text[:-2])
