"""split_backward: its conditions, what it does to a graph, and what a plan keeps between I and W."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packages.compiler.tests.canonical import makespan
from packages.compiler.tests.compile_cases import frozen_first, layered
from packages.compiler.tests.plan_walk import walk
from piper_compiler import (
    Directive,
    Strategy,
    compile_program,
    order,
    partition,
    place,
    recipes,
    split,
    split_backward,
    synthetic,
)
from piper_compiler.build import build_graph
from piper_compiler.compile import apply_directives
from piper_ir.fold.memory import scan
from piper_ir.graph.graph import Graph
from piper_ir.ground.errors import DirectiveError, SelectorError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Compute
from piper_ir.program.program import Program, Signature
from piper_ir.verify import verify
from tests.helpers.cases import each_case

FIRST = (partition(stages=2), split(where(), microbatches=2))
PLACES = (place(where(stage=0), on=dict(pp=0)), place(where(stage=1), on=dict(pp=1)))


def applied(*directives: Directive, program: Program | None = None) -> Graph:
    return apply_directives(build_graph(program or layered(4), Mesh(pp=2)), directives)


def planned(*directives: Directive, program: Program | None = None, pp: int = 2) -> Plan:
    plan = compile_program(program or layered(4), Strategy(Mesh(pp=pp), directives)).plan
    verify(plan)
    return plan


def steps(plan: Plan, role: int) -> list[str]:
    """Per compute instruction its phases and microbatch: "F0", "I0", "IW0" for a backward that is not split."""
    out = []
    for instr in plan.roles[role].program:
        ops = [p for p in instr.parts if isinstance(p.op, Compute)]
        if ops:
            out.append(
                "".join(dict.fromkeys(p.op.step for p in ops if isinstance(p.op, Compute)))
                + str(ops[0].mb)
            )
    return out


@each_case(
    ("condition", "directives", "says"),
    [
        (1, (*FIRST, split_backward(where(phase="F"))), "is no backward"),
        (
            2,
            (*FIRST, split_backward(where()), split_backward(where(stage=0))),
            "belongs to a backward that is split already",
        ),
        (
            3,
            (*FIRST, order(where(mb=0), where(mb=1)), split_backward(where())),
            "is ordered already (order(where(mb=0)",
        ),
    ],
)
def test_conditions(condition: int, directives: tuple[Directive, ...], says: str) -> None:
    with pytest.raises(DirectiveError) as caught:
        applied(*directives)
    message = str(caught.value)
    assert message.startswith("split_backward(where(") and " at test_split_backward.py:" in message
    assert message.endswith(f"[split_backward condition {condition}]") and says in message


def test_a_selection_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(
        SelectorError, match=r"split_backward\(where\(stage=7\)\) at test_split_backward.py"
    ):
        applied(*FIRST, split_backward(where(stage=7)))


def test_before_and_after_split_and_place_is_the_same_plan() -> None:
    apart = split_backward(where())
    plans = {
        planned(FIRST[0], apart, FIRST[1], *PLACES).key,
        planned(*FIRST, apart, *PLACES).key,
        planned(*FIRST, *PLACES, apart).key,
    }
    assert len(plans) == 1


def test_nothing_of_a_backward_is_left_in_the_graph() -> None:
    graph = applied(*FIRST, split_backward(where(stage=1, mb=0)))
    assert {n.id for n in graph.select(where(stage=1, mb=0, phase=("I", "W")))} == {
        f"stage{s}.{step}@0" for s in (2, 3) for step in "IW"
    }
    assert not graph.find(where(stage=1, mb=0, phase="B"))
    assert graph.find(where(stage=1, mb=1, phase="B"))
    gone = {"stage2.B@0", "stage3.B@0"}
    assert not gone & set(graph.nodes)
    assert not gone & {id for ids in graph.index.values() for id in ids}
    assert not gone & {id for ids in graph.readers.values() for id in ids} and not gone & set(
        graph.writer.values()
    )


def test_a_weight_gradient_may_be_ordered_anywhere_after_its_input_gradient() -> None:
    late = order(
        where(stage=0, phase="I", mb=(0, 1)),
        where(stage=0, phase="W", mb=0),
        where(stage=0, phase="W", mb=1),
    )
    plan = planned(*FIRST, split_backward(where(stage=0)), *PLACES, late)
    assert [s for s in steps(plan, 0) if s[0] != "F"] == ["I0", "I1", "W0", "W1"]
    assert [s for s in steps(plan, 1) if s[0] != "F"] == ["IW0", "IW1"]


def test_by_default_weight_gradients_fill_what_would_be_idle() -> None:
    """As ZB-H1: as long a step as there, and no more microbatches in flight than 1F1B has on the first device."""
    p, m = 4, 8
    program = synthetic(stages=p, F=3, I=4, W=2)
    pieces = recipes.pipeline(pp=p, microbatches=m)
    plan = planned(*pieces[:2], split_backward(where()), *pieces[2:], program=program, pp=p)
    whole = planned(*pieces, program=program, pp=p)
    assert makespan(plan) < makespan(whole)
    assert max(r.peak_bytes for r in plan.roles) <= p


@each_case("kept", [0, 3, 10])
def test_after_the_input_gradient_only_what_w_needs_is_kept(kept: int) -> None:
    """One stage, all of I before all of W: what is alive after the I of microbatch i is what it had before, less 10 -
    kept."""
    program = synthetic(stages=1, F=1, I=1, W=1, activation=10, kept_after_I=kept)
    m = 3
    late = order(*(where(phase=phase, mb=i) for phase in "FIW" for i in range(m)))
    plan = planned(
        partition(stages=1),
        split(where(), microbatches=m),
        split_backward(where()),
        late,
        program=program,
        pp=1,
    )
    (role,) = plan.roles
    assert steps(plan, 0) == [f"{phase}{i}" for phase in "FIW" for i in range(m)]
    alive, live = [], 0
    for instr in role.program:
        for part in instr.parts:
            live += sum(plan.values[v].nbytes for v in part.writes) - sum(
                plan.values[v].nbytes for v in part.frees
            )
        alive.append(live)
    assert alive[:9] == [10, 20, 30, 20 + kept, 10 + 2 * kept, 3 * kept, 2 * kept, kept, 0]
    assert role.peak_bytes == max(u.total for u in scan(plan, role)) == 30


@pytest.mark.parametrize("frozen", [1, 2])
def test_frozen_stages_have_neither(frozen: int) -> None:
    pieces = recipes.pipeline(pp=4, microbatches=3)
    orders = [
        order(*(where(stage=s, phase=ph, mb=i) for i in range(3) for ph in "FIW"), missing="skip")
        for s in range(4)
    ]
    plan = planned(
        *pieces[:2],
        split_backward(where()),
        *pieces[2:],
        *orders,
        program=frozen_first(4, frozen),
        pp=4,
    )
    assert steps(plan, 0) == ["F0", "F1", "F2"]
    assert steps(plan, 3) == [f"{ph}{i}" for i in range(3) for ph in "FIW"]
    assert walk(plan) == {r.role: r.peak_bytes for r in plan.roles}
    assert apply_directives(
        build_graph(frozen_first(4, frozen), Mesh(pp=4)), (split_backward(where(stage=0)),)
    ).nodes


def test_a_chunk_without_parameters_has_no_w_and_one_without_input_gradient_may_have_no_i() -> None:
    program = layered(4)
    bare, first = program.chunks[2], program.chunks[0]
    nothing = Signature((), ())
    bare = replace(
        bare,
        inputs=bare.inputs[:1],
        steps={**bare.steps, "I": replace(bare.steps["I"], writes=("gin0",)), "W": nothing},
    )
    alone = replace(first.steps["W"], reads=("saved0", "saved1", "tan0"))
    first = replace(first, steps={"F": first.steps["F"], "I": nothing, "W": alone})
    changed = replace(
        program,
        chunks=(first, program.chunks[1], bare, program.chunks[3]),
        params=tuple(p for p in program.params if p.name != "stage2.weight"),
    )
    graph = applied(*FIRST, split_backward(where()), program=changed)
    assert "stage2.W@0" not in graph.nodes and "stage2.I@0" in graph.nodes
    assert "stage0.I@0" not in graph.nodes and "stage0.W@0" in graph.nodes
    sequence = [where(layer=k, mb=0, phase=ph) for k in (0, 1) for ph in "FIW"]
    with pytest.raises(SelectorError):
        applied(*FIRST, split_backward(where()), order(*sequence), program=changed)
    applied(*FIRST, split_backward(where()), order(*sequence, missing="skip"), program=changed)
    planned(*FIRST, split_backward(where()), *PLACES, program=changed)
