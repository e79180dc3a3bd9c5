"""A plan whose devices share chunks is good, and rules R35 and R36 find the one thing that is wrong in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from packages.ir.tests.breaks import Breaks
from packages.ir.tests.plans_for_tests import (
    change_bucket,
    change_channel,
    change_part,
    change_role,
    good_plan,
)
from piper_ir.fold.memory import with_peaks
from piper_ir.ground.codec import dumps, loads
from piper_ir.ground.mesh import Mesh
from piper_ir.plan.plan import Channel, Plan
from piper_ir.program.layout import DimPart, StepCollective
from piper_ir.program.ops import SquaredNorm
from piper_ir.program.program import Cost, Kernel, OverlappedCollective, Step
from piper_ir.verify import check

SUM = StepCollective("all_reduce", "tp", 64, "the loss")


def sharing_plan() -> Plan:
    """Return the good plan on twice as many devices: pairs share the head, with a part of its bias each."""
    plan = replace(good_plan(), mesh=Mesh(pp=2, dp=2, tp=2), shared=("tp",))
    plan = change_role(change_role(plan, "pp0", ranks=(0, 1, 2, 3)), "pp1", ranks=(4, 5, 6, 7))
    plan = change_param(plan, "bias", layout=(DimPart("tp", 0),))
    plan = change_bucket(plan, "own", parts=("tp",))
    plan = change_channel(plan, "norm", over=("tp",))
    norm = SquaredNorm(("tied", "own"), "float32", ("tied",), ("tp",))
    plan = change_part(plan, "pp1", "squares", op=norm)
    plan = replace(
        plan,
        channels=(
            *plan.channels,
            Channel("tp.pp1", "group", ("pp1",), ("compute",), ("tp",), "tensor"),
        ),
    )
    return with_peaks(change_step(plan, "F", (SUM,)))


def change_param(plan: Plan, name: str, **fields: Any) -> Plan:
    """Return the plan with other facts of a parameter."""
    return replace(
        plan, params=tuple(replace(p, **fields) if p.name == name else p for p in plan.params)
    )


def change_step(plan: Plan, step: Step, collectives: tuple[StepCollective, ...]) -> Plan:
    """Return the plan with other collectives in a step of the head."""
    embed, head = plan.chunks
    steps = {**head.steps, step: replace(head.steps[step], collectives=collectives)}
    return replace(plan, chunks=(embed, replace(head, steps=steps)))


PRODUCT = Kernel("matmul", (4, 4, 4), "float32", 128, 192, 2, op="mm")


def overlapped(plan: Plan, *beside: tuple[int, Kernel], kind: str = "all_gather") -> Plan:
    """Return the plan with a collective and two products in the head's F, which collectives are beside."""
    embed, head = plan.chunks
    overlaps = tuple(OverlappedCollective(number, Cost((kernel,))) for number, kernel in beside)
    cost, collectives = Cost((PRODUCT,)), (SUM, replace(SUM, kind=kind))
    forward = replace(head.steps["F"], cost=cost, collectives=collectives, overlaps=overlaps)
    return replace(plan, chunks=(embed, replace(head, steps={**head.steps, "F": forward})))


GOOD = sharing_plan()


breaks = Breaks(GOOD)


breaks("R35-parts", "devices share chunks along cp, and Mesh(pp=2, dp=2, tp=2) has no such axis")(
    lambda plan: replace(plan, shared=("tp", "cp"))
)
breaks("R35-parts", "devices share chunks along dp, and rows are shared out along it too")(
    lambda plan: replace(plan, shared=("tp", "dp"))
)
breaks("R35-parts", "devices share chunks along pp, and role pp0 is placed on it")(
    lambda plan: replace(plan, shared=("tp", "pp"))
)
breaks(
    "R35-parts", "parameter bias is in parts along tp, tp; devices share chunks along tp, each once"
)(lambda plan: change_param(plan, "bias", layout=(DimPart("tp", 0), DimPart("tp", 0))))
breaks("R35-parts", "parameter bias is in parts of dimension 1, and has 1 dimensions")(
    lambda plan: change_param(plan, "bias", layout=(DimPart("tp", 1),))
)
breaks("R35-parts", "parameter bias has 16 elements in dimension 0, which are not 3 equal parts")(
    lambda plan: change_param(plan, "bias", layout=(DimPart("tp", 0, 3),))
)
breaks(
    "R35-parts",
    "parameter table has gradients that are terms along dp; devices share chunks along tp",
)(lambda plan: change_param(plan, "table", summed=("dp",)))
breaks(
    "R35-parts",
    "parameter bias is in parts along tp, and gradients of parts are no terms of a sum there",
)(lambda plan: change_param(plan, "bias", summed=("tp",)))
breaks("R35-parts", "bucket own has other parts along no axis, and its parameter bias along tp")(
    lambda plan: change_bucket(plan, "own", parts=())
)
breaks("R36-inside", "F of chunk head has an all_reduce along dp; devices share chunks along tp")(
    lambda plan: change_step(plan, "F", (SUM, replace(SUM, axis="dp")))
)
breaks("R36-inside", "asks for the collective gossip")(
    lambda plan: change_step(plan, "F", (SUM, replace(SUM, kind="gossip")))
)
breaks(
    "R36-inside",
    "F of chunk head has an all_gather of 7 bytes, which 2 devices cannot share equally",
)(lambda plan: change_step(plan, "F", (SUM, replace(SUM, kind="all_gather", nbytes=7))))
breaks("R36-inside", "F of chunk head reads parts along tp, and exchanges nothing along it")(
    lambda plan: change_step(plan, "F", ())
)
breaks("R36-inside", "its steps meet along tp, and there is no channel tp.pp1")(
    lambda plan: replace(plan, channels=tuple(c for c in plan.channels if c.purpose != "tensor"))
)
breaks(
    "R36-inside",
    "channel tp.pp1 is for steps, and joins ranks along dp; devices share chunks along tp",
)(lambda plan: change_channel(plan, "tp.pp1", over=("dp",)))
breaks(
    "R36-inside",
    "channel tp.pp1 is for steps, and joins pp0, pp1 on compute, compute; one role on compute is needed",
)(lambda plan: change_channel(plan, "tp.pp1", roles=("pp0", "pp1"), streams=("compute", "compute")))
breaks(
    "R36-inside", "F of chunk head exchanges something else than in embed, which has the same code"
)(lambda plan: replace(plan, chunks=tuple(replace(c, code="x") for c in plan.chunks)))


breaks("R36-inside", "computes beside its collectives 2; each of 2 is named once, in order")(
    lambda plan: overlapped(plan, (2, PRODUCT))
)
breaks("R36-inside", "computes beside its collectives 1, 1; each of 2 is named once")(
    lambda plan: overlapped(plan, *2 * [(1, replace(PRODUCT, count=1))])
)
breaks("R36-inside", "computes beside its all_reduce 1, which cannot be under way meanwhile")(
    lambda plan: overlapped(plan, (1, PRODUCT), kind="all_reduce")
)
breaks("R36-inside", "computes beside its collectives more mm than it has")(
    lambda plan: overlapped(plan, (1, replace(PRODUCT, count=3)))
)


def test_the_plan_is_good_and_can_be_written() -> None:
    for plan in (GOOD, overlapped(GOOD, (1, PRODUCT))):
        assert check(plan) == [] and loads(Plan, dumps(plan)) == plan


def test_one_fault_breaks_one_rule() -> None:
    breaks.check()


def test_parameters_of_a_bucket_are_sums_along_the_same_axes() -> None:
    """Two parameters of one bucket: one reduction cannot leave one of them out."""
    plan = change_bucket(GOOD, "tied", params=("table", "bias"), offsets=(0, 128), numel=192)
    plan = change_param(change_param(plan, "bias", layout=()), "table", summed=("tp",))
    assert any(
        "table and bias, whose gradients are sums along different axes" in v.message
        for v in check(plan)
    )


def test_the_norm_counts_once_along_the_axes_over_which_it_is_summed() -> None:
    plan = change_part(
        GOOD, "pp1", "squares", op=SquaredNorm(("tied", "own"), "float32", ("tied",), ())
    )
    assert [v.rule for v in check(plan)] == ["R27-dataflow"] * 2
