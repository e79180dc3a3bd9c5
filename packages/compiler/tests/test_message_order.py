"""An order names gathers of parameters and reductions of gradients, which come to be when a strategy is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from packages.compiler.tests.compile_cases import layered
from packages.compiler.tests.test_lowering import planned
from piper_compiler import order, overlap, place, recipes, split, split_backward
from piper_compiler.build import build_graph
from piper_compiler.compile import apply_directives
from piper_ir.graph.graph import Graph
from piper_ir.ground.codec import dumps, loads
from piper_ir.ground.errors import PiperError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.plan.plan import COMPUTE, Instr, Plan
from piper_ir.program.ops import Collective, Compute
from piper_ir.verify import check
from tests.helpers.cases import each_case


def plan_of(*orders: Any, zero: int = 1, dp: int = 2, **settings: Any) -> Plan:
    """Return the plan of four layers, each a bucket, in two microbatches, under further directives."""
    states = recipes.data_parallel(zero=zero, bucket_mb=1e-4, **settings) if dp > 1 else ()
    return planned(layered(4), split(where(), microbatches=2), *states, *orders, dp=dp)


def messages(plan: Plan, kind: str) -> list[tuple[str, Instr]]:
    """Return the collectives of a kind on buckets, each with the parameter of its bucket, in program order."""
    found = []
    for instr in plan.roles[0].program:
        op = instr.parts[0].op
        if isinstance(op, Collective) and op.kind == kind:
            found.append((plan.bucket(op.bucket).params[0], instr))
    return found


def test_gathers_have_the_order_of_their_layers_or_another_one() -> None:
    names = [name for name, _ in messages(plan_of(), "all_gather")]
    asked = [where(op="gather", layer=k) for k in (3, 0, 2, 1)]
    plan = plan_of(order(*asked))
    assert check(plan) == []
    found = [name for name, _ in messages(plan, "all_gather")]
    assert found == [names[k] for k in (3, 0, 2, 1)]
    graph = apply_directives(build_graph(layered(4), Mesh(dp=2)), (order(*asked),))
    assert graph.message_orders and loads(Graph, dumps(graph)) == graph


@pytest.mark.parametrize(("zero", "kind"), [(0, "all_reduce"), (1, "reduce_scatter")])
def test_reductions_wait_for_a_backward_and_a_backward_for_a_reduction(
    zero: int, kind: str
) -> None:
    def waited(plan: Plan) -> list[int]:
        """Return the waits for compute: one that an earlier message has kept is not said again."""
        waits = [dict(instr.waits).get(COMPUTE, 0) for _, instr in messages(plan, kind)]
        return [n for n in waits if n]

    late = plan_of(order(where(phase="B"), where(op="reduce")), zero=zero)
    assert check(late) == []
    usual = waited(plan_of(zero=zero))
    assert len(usual) == 4 and waited(late) == usual[-1:]
    first = plan_of(order(where(op="reduce", layer=3), where(phase="B", layer=1)), zero=zero)
    assert check(first) == []
    program = first.roles[0].program
    (reduced,) = (k for k, i in enumerate(program) if i is messages(first, kind)[0][1])
    steps = [
        (k, i)
        for k, i in enumerate(program)
        for p in i.parts
        if isinstance(p.op, Compute) and p.op.chunk.endswith("1") and p.op.step == "I"
    ]
    assert len(steps) == 2 and reduced < steps[0][0]
    assert program[reduced].stream in dict(steps[0][1].waits)


@each_case(
    ("asked", "settings", "error"),
    [
        (
            lambda: order(where(mb=0), overlap(where(op="reduce"), where(mb=1))),
            {},
            r"an overlap is of compute.* \[order condition 6\]",
        ),
        (
            lambda: order(where(op="gather", mb=0), where(mb=1)),
            {},
            r"of the whole step; leave mb and phase out \[order condition 6\]",
        ),
        (
            lambda: order(where(op="gather", layer=0), where(layer=1)),
            {"zero": 3},
            r"order\(.*is gathered for its uses, as prefetch says.*\[order condition 7\]",
        ),
        (
            lambda: order(where(op="reduce", layer=0), where(op="reduce", layer=1)),
            {"zero": 2},
            r"is reduced for its uses, as reduced_mb says.*\[order condition 7\]",
        ),
        (
            lambda: order(where(phase="B"), where(op="reduce")),
            {"dp": 1},
            r"no gradients are reduced for .*\[order condition 7\]",
        ),
        (
            lambda: order(where(op="gather", layer=0), where(layer=1)),
            {"zero": 0},
            r"no parameters are gathered for .*\[order condition 7\]",
        ),
        (
            lambda: order(where(op="reduce", layer=0), where(phase="B", layer=0)),
            {},
            r"cyclic[^$]*ordered by order\(where\(layer=0",
        ),
        (
            lambda: order(where(op="gather"), where(layer=7)),
            {},
            r"where\(layer=7\) matches no node",
        ),
        (
            lambda: order(where(op="gather", layer=7), where(layer=1)),
            {},
            r"where\(layer=7\) matches no node",
        ),
    ],
)
def test_orders_of_messages_that_cannot_be_kept_are_refused(
    asked: Callable[[], object], settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(PiperError, match=error):
        plan_of(asked(), **settings)


def test_orders_that_meet_in_a_circle_are_refused() -> None:
    """Two devices have both layers, each for a microbatch, and reduce them in opposite turns."""
    places = [place(where(mb=k), on=dict(pp=k)) for k in (0, 1)]
    orders = [
        order(where(op="reduce", layer=1 - k), where(layer=k, phase="W", mb=k)) for k in (0, 1)
    ]
    with pytest.raises(
        PiperError, match=r"cyclic[^$]*ordered by order\(where\(layer=[^$]*one message"
    ):
        planned(
            layered(2),
            split(where(), microbatches=2),
            split_backward(where()),
            *places,
            *recipes.data_parallel(bucket_mb=1e-4),
            *orders,
            pp=2,
            dp=2,
        )


def test_stages_have_messages_of_their_own() -> None:
    """The order holds on the device that has both; the bucket of another device is not in it."""
    asked = order(where(phase="B", stage=1), where(op="reduce", stage=1))
    pieces = (*recipes.one_f_one_b(pp=2, microbatches=2), *recipes.data_parallel(bucket_mb=1e-4))
    plan = planned(layered(4), *pieces, asked, pp=2, dp=2)
    assert check(plan) == []
    waits = [
        sum(COMPUTE in dict(i.waits) for i in role.program if i.stream.startswith("reduce"))
        for role in plan.roles
    ]
    assert waits == [2, 1]
