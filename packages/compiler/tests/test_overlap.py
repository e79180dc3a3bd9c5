"""overlap: pairs of given durations become one instruction, members of captured programs are interleaved by the
sweep."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from packages.compiler.tests.canonical import makespan
from packages.compiler.tests.compile_cases import layered
from packages.compiler.tests.plan_walk import walk
from piper_compiler import (
    Directive,
    Strategy,
    compile_program,
    describe,
    order,
    overlap,
    partition,
    place,
    recipes,
    split,
    split_backward,
    synthetic,
)
from piper_ir.ground.errors import CompileError, DirectiveError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import Where, where
from piper_ir.plan.plan import Instr, Plan
from piper_ir.program.costs import Costs, Duration
from piper_ir.program.ops import Compute
from piper_ir.program.program import Cost, Kernel, Program
from piper_ir.verify import verify


def one(stage: int, phase: str, mb: int) -> Where:
    return where(stage=stage, phase=phase, mb=mb)


def planned(
    program: Program, *directives: Directive, pp: int = 2, costs: Costs | None = None
) -> Plan:
    plan = compile_program(program, Strategy(Mesh(pp=pp), directives), costs=costs).plan
    verify(plan)
    return plan


def compute(plan: Plan, role: int) -> list[Instr]:
    return [i for i in plan.roles[role].program if any(isinstance(p.op, Compute) for p in i.parts)]


def nodes(instr: Instr) -> list[str]:
    return [p.node for p in instr.parts if isinstance(p.op, Compute)]


PIPELINE = recipes.pipeline(pp=2, microbatches=3)
PAIRED = (
    order(
        one(0, "F", 0),
        one(0, "F", 1),
        overlap(one(0, "B", 0), one(0, "F", 2)),
        one(0, "B", 1),
        one(0, "B", 2),
    ),
    order(
        one(1, "F", 0),
        one(1, "B", 0),
        one(1, "F", 1),
        one(1, "B", 1),
        one(1, "F", 2),
        one(1, "B", 2),
    ),
)


def test_a_pair_of_a_synthetic_program_is_one_instruction_of_its_given_seconds() -> None:
    for given, seconds in ((None, 9.0), (5.0, 5.0)):
        program = synthetic(stages=2, F=3, I=4, W=2, overlap=given)
        plan = planned(program, *PIPELINE, *PAIRED)
        (pair,) = [i for i in compute(plan, 0) if i.seconds is not None]
        assert pair.seconds == seconds
        assert nodes(pair) == ["stage0.F@2", "stage0.I@0", "stage0.W@0"], (
            "forward first, however it was written"
        )
        assert all(i.seconds is None for i in compute(plan, 1))
        assert walk(plan) == {r.role: r.peak_bytes for r in plan.roles}
    # By hand: device 0 ends its second forward at 6, waits for the gradient of microbatch 0 until 3 + 3 + 6 = 12, and
    # runs the pair to 17; device 1 has been through with microbatch 1 at 21 and gets microbatch 2 at 17, so it ends at
    # 30, device 0 at 36.
    assert makespan(plan) == 36
    assert makespan(planned(synthetic(stages=2, F=3, I=4, W=2), *PIPELINE, *PAIRED)) == 36


def test_pairs_of_uneven_stages_save_the_mean_of_what_both_save() -> None:
    program = synthetic(stages=2, F=[3, 1], I=[4, 1], W=[2, 1], overlap=[5, 3])
    both = (where(stage=0), where(stage=1))
    places = [place(s, on=dict(pp=0)) for s in both]
    pair = order(one(0, "F", 0), one(1, "F", 0), overlap(one(0, "F", 1), one(1, "B", 0)))
    plan = planned(
        program, partition(stages=2), split(where(), microbatches=2), *places, pair, pp=1
    )
    (found,) = [i for i in compute(plan, 0) if i.seconds is not None]
    assert found.seconds == 3 + 2 - (4 + 0) / 2


def test_a_split_backward_pairs_as_a_whole_one_and_half_of_it_does_not() -> None:
    program = synthetic(stages=1, F=3, I=4, W=2, overlap=5)
    first = (partition(stages=1), split(where(), microbatches=2), split_backward(where()))
    whole = order(one(0, "F", 0), overlap(one(0, "F", 1), one(0, "I", 0), one(0, "W", 0)))
    half = order(one(0, "F", 0), overlap(one(0, "F", 1), one(0, "I", 0)), one(0, "W", 0))
    for item, seconds in ((whole, 5.0), (half, 7.0)):
        assert [
            i.seconds for i in compute(planned(program, *first, item, pp=1), 0) if i.seconds
        ] == [seconds]


def test_halves_of_two_backwards_are_no_pair() -> None:
    """I of one microbatch beside W of another takes the sum, and so do W and I of two, whichever is written first."""
    program = synthetic(stages=1, F=3, I=4, W=2, overlap=5)
    first = (partition(stages=1), split(where(), microbatches=3), split_backward(where()))
    for i, w in ((1, 0), (0, 1)):
        group = overlap(one(0, "F", 2), one(0, "I", i), one(0, "W", w))
        item = order(
            one(0, "F", 0),
            one(0, "F", 1),
            one(0, "I", w),
            group,
            one(0, "W", i),
            one(0, "I", 2),
            one(0, "W", 2),
        )
        (found,) = [
            n for n in compute(planned(program, *first, item, pp=1), 0) if n.seconds is not None
        ]
        assert sorted(nodes(found)) == sorted(["stage0.F@2", f"stage0.I@{i}", f"stage0.W@{w}"])
        assert found.seconds == 3 + 4 + 2


def test_a_backward_without_a_weight_gradient_is_whole_as_an_I() -> None:
    program = synthetic(stages=1, F=3, I=4, W=0, overlap=5)
    idle = replace(program.chunks[0].steps["W"], cost=Cost())
    chunk = replace(program.chunks[0], steps={**program.chunks[0].steps, "W": idle})
    frozen = replace(program, chunks=(chunk,))
    first = (partition(stages=1), split(where(), microbatches=2), split_backward(where()))
    item = order(one(0, "F", 0), overlap(one(0, "F", 1), one(0, "I", 0)), one(0, "I", 1))
    assert [i.seconds for i in compute(planned(frozen, *first, item, pp=1), 0) if i.seconds] == [
        5.0
    ]


def test_a_pair_that_waits_for_itself_is_refused_with_the_directives_and_devices() -> None:
    """The forward of microbatch 0 on device 0 must be through device 1 before its backward."""
    bad = order(one(0, "F", 1), overlap(one(0, "F", 0), one(0, "B", 0)))
    with pytest.raises(CompileError) as caught:
        planned(synthetic(stages=2, F=1, I=1, W=1), *PIPELINE, bad)
    message = str(caught.value)
    assert "cyclic" in message and "on pp0" in message and "on pp1" in message
    assert "stage0.F@0 and stage0.B@0 run as one, which needs it; overlapped by order(" in message
    assert "test_overlap.py:" in message


def test_an_overlap_has_two_members_inside_of_an_order() -> None:
    with pytest.raises(DirectiveError, match=r"at least two selections \[order condition 5\]"):
        planned(
            layered(2), *PIPELINE, order(one(0, "F", 0), overlap(one(0, "F", 1)), one(0, "F", 2))
        )
    cut = order(selections=(one(0, "F", 0), one(0, "F", 1)), overlaps=((1, 2),))
    with pytest.raises(DirectiveError, match=r"not inside of the order \[order condition 5\]"):
        planned(layered(2), *PIPELINE, cut)
    with pytest.raises(DirectiveError, match="is no directive"):
        Strategy(Mesh(), (overlap(one(0, "F", 0), one(0, "F", 1)),))


def test_an_order_with_overlaps_says_itself_and_comes_back_from_json() -> None:
    assert describe(PAIRED[0]).startswith(
        "order(where(mb=0, phase='F', stage=0), where(mb=1, phase='F', stage=0), overlap(where(mb=0, phase='B', "
        "stage=0), where("
    )
    strategy = Strategy(Mesh(pp=2), (*PIPELINE, *PAIRED))
    assert Strategy.loads(strategy.dumps()) == strategy
    assert Strategy.loads(strategy.dumps()).directives[-2].overlaps == ((2, 2),)  # type: ignore[attr-defined]  # it is an order


def test_what_comes_before_and_after_an_overlap_holds_for_both_members() -> None:
    graph = compile_program(layered(4), Strategy(Mesh(pp=2), (*PIPELINE, *PAIRED))).graph
    (group,) = graph.overlaps
    assert group.members == ((("stage1.B", 0), ("stage0.B", 0)), (("stage0.F", 2), ("stage1.F", 2)))
    assert {
        (("stage1.F", 1), ("stage1.B", 0)),
        (("stage1.F", 1), ("stage0.F", 2)),
    } <= graph.order_edges.keys()
    assert {
        (("stage0.B", 0), ("stage1.B", 1)),
        (("stage1.F", 2), ("stage1.B", 1)),
    } <= graph.order_edges.keys()


def computed(layers: int) -> Program:
    """Layers whose durations are not given but in costs."""
    program = layered(layers)
    kernel = Kernel("matmul", (), "float32", 1, 1)
    chunks = []
    for c in program.chunks:
        steps = {s: replace(sig, cost=Cost((kernel,))) for s, sig in c.steps.items()}
        chunks.append(replace(c, code=c.id, steps=steps))
    return replace(program, chunks=tuple(chunks), source="captured")


def measured(program: Program, seconds: dict[tuple[str, str], float]) -> Costs:
    table = {
        c.id: {s: Duration(seconds.get((c.id, s), 1.0)) for s in c.steps} for c in program.chunks
    }
    return Costs(table)


FINE = (
    order(
        one(0, "F", 0),
        one(0, "F", 1),
        overlap(one(0, "F", 2), one(0, "B", 0)),
        one(0, "B", 1),
        one(0, "B", 2),
    ),
    PAIRED[1],
)


def interleaving(plan: Plan) -> list[str]:
    wanted = {"stage0.F@2", "stage1.F@2", "stage0.I@0", "stage1.I@0"}
    return [n for i in compute(plan, 0) for n in nodes(i) if n in wanted]


def test_the_sweep_chooses_the_interleaving_that_ends_first() -> None:
    """Device 1 idles until microbatch 2 comes when its own steps are quick, so the forward goes first; when device 1 is
    slow and the last backward is what everybody waits for, nothing is gained by it and the first candidate stays."""
    program = computed(4)
    plans = {}
    for name, seconds in (
        ("forward pays", {("stage0", "I"): 5.0, ("stage1", "I"): 5.0}),
        ("nothing pays", {("stage2", "F"): 40.0, ("stage3", "F"): 40.0}),
    ):
        costs = measured(program, seconds)
        plans[name] = planned(program, *PIPELINE, *FINE, costs=costs)
        again = planned(program, *PIPELINE, *FINE, costs=costs)
        assert again.key == plans[name].key, "the same every time"
    assert interleaving(plans["forward pays"])[0].startswith("stage0.F")
    assert all(i.seconds is None for plan in plans.values() for i in compute(plan, 0)), (
        "no span where nothing is given"
    )


def test_the_choice_is_no_worse_than_either_order_written_out() -> None:
    program = computed(4)
    for seed in range(12):
        durations = {
            (c.id, s): float((7 * seed + 3 * k + ord(s)) % 11 + 1)
            for k, c in enumerate(program.chunks)
            for s in c.steps
        }
        costs = measured(program, durations)
        first, second = one(0, "F", 2), one(0, "B", 0)
        plans = [
            planned(program, *PIPELINE, order(one(0, "F", 0), one(0, "F", 1), *middle, one(0, "B", 1), one(0, "B", 2)), PAIRED[1],
                    costs=costs)
            for middle in ((overlap(first, second),), (first, second), (second, first))
        ]  # fmt: skip
        chosen, one_way, other = (makespan(plan, costs) for plan in plans)
        assert chosen <= min(one_way, other) + 1e-9, seed


def test_an_order_is_the_same_in_another_process() -> None:
    item = order(
        where(mb=0, phase="F"), overlap(where(mb=1), where(mb=(2, 3), stage=0)), missing="skip"
    )
    assert pickle.loads(pickle.dumps(item)) == item
    assert pickle.loads(pickle.dumps(item)).site == item.site != ""
