"""Each rule of `verify` on training finds the one thing that is wrong in a plan: steps, buckets, updates and peaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from packages.ir.tests.breaks import Breaks
from packages.ir.tests.plans_for_tests import (
    change_bucket,
    change_channel,
    change_instr,
    change_part,
    change_program,
    change_role,
    find,
    good_plan,
    lone_plan,
)
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import Instr, Part, Plan
from piper_ir.program.ops import Collective, Seed, SquaredNorm, Update
from piper_ir.program.program import Input, Output
from piper_ir.verify import check
from piper_ir.verify import training as verify_training
from piper_ir.verify.rules import Findings

GOOD = good_plan()
breaks = Breaks(GOOD)

breaks("R21-steps", "W of chunk embed runs 2 times (on pp0, pp0) for microbatch 0; 1 expected")(
    lambda plan: change_part(plan, "pp0", "embed.W@1", mb=0)
)


@breaks("R21-steps", "the plan has 1000000000000 microbatches, and runs 10 steps in all")
def _far_too_few_steps(plan: Plan) -> Plan:
    seed = change_part(plan, "pp1", "seed@0", op=Seed(0.5e-12, "float32"))
    return replace(
        change_part(seed, "pp1", "seed@1", op=Seed(0.5e-12, "float32")), microbatches=10**12
    )


breaks("R22-buckets", "table starts at byte 4, which is no multiple of 256")(
    lambda plan: change_bucket(plan, "tied", offsets=(1,))
)
breaks("R22-buckets", "bucket own has 64 elements; bias ends at 80")(
    lambda plan: change_bucket(plan, "own", offsets=(64,))
)
breaks("R22-buckets", "1 parameters and 0 offsets")(
    lambda plan: change_bucket(plan, "own", offsets=())
)
breaks("R23-holders", "parameter bias is not trained, but in bucket own")(
    lambda plan: replace(plan, params=(plan.params[0], replace(plan.params[1], trained=False)))
)
breaks("R23-holders", "several ranks hold it, and no channel reduces it")(
    lambda plan: change_bucket(plan, "own", channel="")
)
breaks("R23-holders", "role pp1 is replicated along dp, the bucket along nothing")(
    lambda plan: change_bucket(change_channel(plan, "own", over=()), "own", over=())
)


@breaks("R23-holders", "it adds gradients along dp, and rows are shared out along none")
def _over_ranks_of_the_same_rows(plan: Plan) -> Plan:
    same = replace(plan, replicated=())
    for mb in range(plan.microbatches):
        same = change_part(same, "pp1", f"seed@{mb}", op=Seed(1 / plan.microbatches, "float32"))
    return same


breaks("R23-holders", "parameter table is used by pp0, pp1; its bucket tied is held by pp1")(
    lambda plan: change_bucket(plan, "tied", roles=("pp1",))
)
breaks("R24-reduction", "bucket own is reduced 0 times; 1 is expected")(
    lambda plan: change_part(plan, "pp1", "reduce.own", op=Collective("all_reduce", "own", "tied"))
)
breaks("R24-reduction", "is reduced without waiting for instruction 9")(
    lambda plan: change_instr(plan, "pp1", "reduce.tied", waits=(("compute", 3),))
)


@breaks("R24-reduction", "is accumulated into by instruction 12, after this reduction of it")
def _accumulated_late(plan: Plan) -> Plan:
    def edit(program: list[Instr]) -> None:
        program.insert(11, replace(program.pop(12), waits=(("compute", 3),)))

    return change_program(plan, "pp0", edit)


breaks("R25-update", "bucket tied is updated 0 times; once is expected")(
    lambda plan: change_part(plan, "pp1", "update", op=Update(("own",), clip=1.0))
)
breaks("R25-update", "bucket own is updated 2 times; once is expected")(
    lambda plan: change_part(plan, "pp1", "update", op=Update(("tied", "own", "own"), clip=1.0))
)
breaks("R25-update", "has its norm here, without waiting for its reduction by instruction 12")(
    lambda plan: change_instr(plan, "pp1", "squares", waits=())
)
breaks("R26-scale", "gradients are clipped differently: 1.0 on pp0, 2.0 on pp1")(
    lambda plan: change_part(plan, "pp1", "update", op=Update(("tied", "own"), clip=2.0))
)
breaks("R26-scale", "the loss gradient starts from 0.5; 0.25 is expected")(
    lambda plan: change_part(plan, "pp1", "seed@0", op=Seed(0.5, "float32"))
)
breaks("R26-scale", "weighted is False, but the loss is a sum")(
    lambda plan: replace(plan, loss_kind="sum")
)
breaks("R27-dataflow", "reads a@0#pp1 as in0: missing embed:out0@0; not asked for embed:out1@0")(
    lambda plan: change_part(
        change_part(plan, "pp0", "send.a@0", reads=("b@0",)), "pp0", "send.b@0", reads=("a@0",)
    )
)
breaks("R27-dataflow", "as tan0: missing head:gin0@1; not asked for head:gin2@1")(
    lambda plan: change_part(plan, "pp1", "sum@1", reads=("g2@1", "g2@1"))
)
breaks(
    "R27-dataflow",
    "the norm that it reads is not the sum over each bucket, once: missing norm own",
)(lambda plan: change_part(plan, "pp1", "squares", op=SquaredNorm(("tied",), "float32")))
breaks("R27-dataflow", "not asked for norm own summed over dp, norm tied summed over dp")(
    lambda plan: change_channel(plan, "norm", over=("dp",))
)


def _change_head(plan: Plan, **fields: Any) -> Plan:
    return replace(plan, chunks=(plan.chunks[0], replace(plan.chunks[1], **fields)))


@breaks(
    "R07-signature", "input 5 of chunk head is the param bias as a float32[8]; it is a float32[16]"
)
def _parameter_of_another_shape(plan: Plan) -> Plan:
    head = plan.chunks[1]
    return _change_head(
        plan, inputs=(*head.inputs[:5], replace(head.inputs[5], spec=TensorSpec((8,), "float32")))
    )


@breaks(
    "R34-accumulation",
    "chunk head adds 0 times to the gradient of bias in a microbatch; 1 is expected",
)
def _accumulation_dropped(plan: Plan) -> Plan:
    steps = plan.chunks[1].steps
    return _change_head(plan, steps={**steps, "W": replace(steps["W"], accumulates=(4,))})


@breaks(
    "R34-accumulation",
    "chunk head adds 2 times to the gradient of table in a microbatch; 1 is expected",
)
def _accumulation_doubled(plan: Plan) -> Plan:
    steps = plan.chunks[1].steps
    return _change_head(plan, steps={**steps, "I": replace(steps["I"], accumulates=(4,))})


breaks("R28-peak", "the plan states a peak of bytes 1, and the scan gives")(
    lambda plan: change_role(plan, "pp0", peak_bytes=1)
)
breaks("R28-peak", "peak of instruction 0, and the scan gives 9")(
    lambda plan: change_role(plan, "pp1", peak_at=0)
)


def test_microbatches_may_run_in_any_order_unless_they_update_a_buffer() -> None:
    swapped = GOOD
    for role in GOOD.roles:
        program = [
            replace(i, parts=tuple(replace(p, mb=1 - p.mb if p.mb >= 0 else -1) for p in i.parts))
            for i in role.program
        ]
        swapped = change_role(swapped, role.role, program=tuple(program))
    assert check(swapped) == []
    embed = GOOD.chunks[0]
    counting = (
        replace(embed, outputs=(*embed.outputs, Output("buffer", embed.inputs[2].spec, "scale"))),
        GOOD.chunks[1],
    )
    assert check(replace(GOOD, chunks=counting)) == []
    (found,) = check(replace(swapped, chunks=counting))
    assert found.rule == "R21-steps" and found.index == 0
    assert (
        "F of chunk embed, which updates a buffer, for microbatch 1: runs before instruction 3"
        in found.message
    )


def test_a_buffer_is_read_after_its_update_of_the_microbatch_before() -> None:
    """Chunks that read and update a buffer on one role run in the order of one device."""
    embed, head = GOOD.chunks
    read = Input("buffer", "scale", embed.inputs[2].spec)
    update = Output("buffer", embed.inputs[2].spec, "scale")
    uses = {("embed", mb): mb * 2 for mb in range(2)} | {
        ("head", mb): mb * 2 + 1 for mb in range(2)
    }
    chunks = (embed, replace(head, inputs=(*head.inputs, read), outputs=(*head.outputs, update)))

    def found(places: dict[tuple[str, int], int]) -> list[str]:
        findings = Findings(replace(GOOD, chunks=chunks))
        role = GOOD.roles[0]
        verify_training._check_buffers(
            findings, lambda chunk, mb, step: [(role, (places[chunk, mb], 0))]
        )
        return [v.message for v in findings.violations]

    assert found(uses) == []
    (early,) = found({**uses, ("embed", 1): 0, ("embed", 0): -1, ("head", 0): 1})
    assert (
        "F of chunk embed, which reads the buffer scale, which others update, for microbatch 1: runs before"
        in early
    )
    (late,) = found({**uses, ("embed", 0): 1, ("head", 0): 0})
    assert (
        "F of chunk head, which updates a buffer, for microbatch 0: runs before instruction 1"
        in late
    )


def test_an_update_before_the_last_use_is_found_where_nothing_is_reduced() -> None:
    plan = lone_plan()
    parts = plan.role("pp1").program[find(plan, "pp1", "head.I@0")].parts
    early = change_instr(
        plan, "pp1", "head.I@0", parts=(*parts, Part("early", Update(("own",), clip=None)))
    )
    found = check(change_part(early, "pp1", "update", op=Update(("tied",), clip=1.0)))
    assert {v.rule for v in found} >= {"R25-update"}
    assert "bucket own has its update here, before instruction 9 uses it" in found[0].message


def test_one_fault_breaks_one_rule() -> None:
    breaks.check()
