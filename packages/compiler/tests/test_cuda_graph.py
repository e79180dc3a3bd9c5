"""The conditions of steps that are CUDA graphs, one test each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from piper_compiler import Options, Strategy, Training, compile_program, offload, split, synthetic
from piper_ir.ground.errors import CompileError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.plan.plan import Plan
from piper_ir.program.program import Chunk, Cost, Kernel

PROGRAM = synthetic(stages=2, F=1.0, I=1.0, W=1.0, params=1024, activation=64)


def graphed(*directives: Any, training: Training | None = None, **changes: Any) -> Plan:
    """The plan of two chunks, of which the second is changed."""
    first, second = PROGRAM.chunks
    program = replace(PROGRAM, source="by hand", chunks=(first, replace(second, **changes)))
    strategy = Strategy(Mesh(pp=1), (split(where(), microbatches=2), *directives))
    return compile_program(
        program, strategy, training=training, options=Options(cuda_graph=True)
    ).plan


def refused(condition: int, *directives: Any, **more: Any) -> str:
    with pytest.raises(CompileError) as caught:
        graphed(*directives, **more)
    assert str(caught.value).startswith(f"Options(cuda_graph=True): condition {condition}: ")
    assert str(caught.value).endswith(", or leave cuda_graph out")
    return str(caught.value)


def steps_with(chunk: Chunk, **fields: Any) -> dict[str, Any]:
    return {**chunk.steps, "F": replace(chunk.steps["F"], **fields)}


def test_a_plan_says_that_it_is_one() -> None:
    plan = graphed()
    assert plan.cuda_graph
    assert not compile_program(
        PROGRAM, Strategy(Mesh(pp=1), (split(where(), microbatches=2),))
    ).plan.cuda_graph


def test_1_no_chunk_is_opaque() -> None:
    assert f"chunk {PROGRAM.chunks[1].id} as it is" in refused(1, opaque=True)


def test_2_no_step_counts_tokens_on_the_host() -> None:
    second = PROGRAM.chunks[1]
    product = Cost((Kernel("matmul", (), "bfloat16", 1, 1, op="grouped_mm"),), 1.0)
    assert "grouped_mm of chunk" in refused(2, steps=steps_with(second, cost=product))


def test_3_nothing_is_on_the_host() -> None:
    assert "tensors wait" in refused(3, offload(where(), least_mb=0))
    assert "is updated in" in refused(3, offload(where(), tensors="optim"))


def test_4_random_numbers_are_drawn_by_row() -> None:
    assert graphed(random=True).cuda_graph
    assert 'draws="microbatches"' in refused(4, random=True, training=Training(drawn_by_row=False))
