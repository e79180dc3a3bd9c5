"""synthetic: what is given is what the program has, and bad lengths and signs are refused."""

from __future__ import annotations

from typing import Any

import pytest

from piper_compiler import Strategy, compile_program, recipes, synthetic
from piper_ir.ground.codec import dumps, loads
from piper_ir.ground.errors import CompileError
from piper_ir.ground.mesh import Mesh
from piper_ir.plan.plan import CATEGORIES
from piper_ir.program.program import Program
from tests.helpers.cases import each_case

GOOD = {"stages": 3, "F": 1, "I": 2, "W": 3}


def test_a_tagged_chain() -> None:
    program = synthetic(**GOOD)
    assert [c.coords for c in program.chunks] == [{"stage": 0}, {"stage": 1}, {"stage": 2}]
    assert [c.outputs[0].kind for c in program.chunks] == ["value", "value", "loss"]
    assert [[i.ref for i in c.inputs] for c in program.chunks] == [
        ["inputs"],
        ["stage0:out0"],
        ["stage1:out0"],
    ]
    assert program.source == "synthetic" and not program.params
    assert loads(Program, dumps(program)) == program


def test_per_stage_values() -> None:
    program = synthetic(
        stages=2,
        F=[1, 2],
        I=3,
        W=[4, 5],
        activation=[10, 20],
        kept_after_I=[4, 0],
        params=[0, 8],
        overlap=7,
        hop=0.5,
    )
    seconds = [[c.steps[s].cost.seconds for s in ("F", "I", "W")] for c in program.chunks]
    assert seconds == [[1, 3, 4], [2, 3, 5]]
    saved = [[c.ports[p].nbytes for p in ("saved0", "saved1")] for c in program.chunks]
    assert saved == [[6, 4], [20, 0]]
    assert [(p.name, p.spec.nbytes) for p in program.params] == [("stage1.weight", 8)]
    assert program.overlap == (7.0, 7.0) and program.hop == 0.5


def test_what_W_keeps_is_all_by_default() -> None:
    chunk = synthetic(**GOOD, activation=5).chunks[0]
    assert (chunk.ports["saved0"].nbytes, chunk.ports["saved1"].nbytes) == (0, 5)


def test_boundary_values_and_seeds_have_no_bytes() -> None:
    plan = compile_program(
        synthetic(**GOOD, activation=9), Strategy(Mesh(pp=3), recipes.gpipe(pp=3, microbatches=2))
    ).plan
    sizes = {v.category: 0 for v in plan.values.values()}
    for name, value in plan.values.items():
        sizes[value.category] += 0 if ":saved" in name else value.nbytes
    assert set(sizes) <= set(CATEGORIES) and not any(sizes.values())


@each_case(
    ("changed", "says"),
    [
        ({"stages": 0}, "synthetic(stages=0): at least one stage"),
        (
            {"F": [1, 2]},
            "synthetic(F=...): 2 values for 3 stages; give one number, or one per stage",
        ),
        ({"F": float("nan")}, "synthetic(F=nan): seconds and bytes are finite"),
        ({"W": -1}, "synthetic(W=-1): seconds and bytes are finite numbers that are not negative"),
        ({"params": [1, 2, -3]}, "not negative"),
        ({"hop": -0.1}, "synthetic(hop=-0.1): seconds are a finite number that is not negative"),
        ({"activation": 1, "kept_after_I": 2}, "kept_after_I is larger than activation"),
        ({"overlap": [1]}, "synthetic(overlap=...): 1 values for 3 stages"),
    ],
)
def test_refusals(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(CompileError) as caught:
        synthetic(**{**GOOD, **changed})
    assert says in str(caught.value)
