"""A plan with recomputation is good, and rule R33 finds the one thing that is wrong in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from packages.ir.tests.breaks import Breaks
from packages.ir.tests.plans_for_tests import change_instr, change_part, find, good_plan
from piper_ir.fold.memory import with_peaks
from piper_ir.ground.codec import dumps, loads
from piper_ir.plan.plan import Part, Plan, Value
from piper_ir.plan.text import format_plan
from piper_ir.program.ops import Compute, Load
from piper_ir.program.program import Signature, Step
from piper_ir.verify import check


def recomputing_plan() -> Plan:
    """Return the good plan, in which the embedding keeps nothing in microbatch 0."""
    plan = good_plan()
    embed = plan.chunk("embed")
    steps: dict[Step, Signature] = dict(embed.steps)
    steps["F"] = replace(embed.steps["F"], writes=("out0", "out1"))
    steps["R"] = Signature(("in0",), ("saved0",))
    plan = replace(plan, variants=(replace(embed, steps=steps, keep="inputs"),))
    forward = Compute("embed", "F", "inputs")
    plan = change_part(plan, "pp0", "embed.F@0", op=forward, writes=("a@0", "b@0"), frees=())
    again = Part("embed.R@0", Compute("embed", "R", "inputs"), 0, ("x@0",), ("s@0",), ("x@0",))
    (w,) = plan.role("pp0").program[find(plan, "pp0", "embed.W@0")].parts
    weights = replace(w, op=Compute("embed", "W", "inputs"))
    return with_peaks(change_instr(plan, "pp0", "embed.W@0", parts=(again, weights)))


GOOD = recomputing_plan()


breaks = Breaks(GOOD)


def change_variant(plan: Plan, step: Step, **fields: Any) -> Plan:
    """Return the plan with another signature of a step of the variant, beside which the parts are as they were."""
    (variant,) = plan.variants
    changed: Any = replace(variant.steps[step], **fields)
    return replace(plan, variants=(replace(variant, steps={**variant.steps, step: changed}),))


@breaks("R33-recompute", "runs under the policy all, its forward under inputs")
def _two_policies(plan: Plan) -> Plan:
    parts = plan.role("pp0").program[find(plan, "pp0", "embed.R@0")].parts
    return change_instr(
        plan, "pp0", "embed.R@0", parts=(parts[0], replace(parts[1], op=Compute("embed", "W")))
    )


@breaks("R33-recompute", "embed.R@0 reads y@0 as in0; its forward read x@0")
def _other_value(plan: Plan) -> Plan:
    """A second load of the same rows is read by R; what it asks for is there, so that no other rule sees it."""
    values = {**plan.values, "y@0": Value("y@0", plan.values["x@0"].spec, "batch")}
    again, weights = plan.role("pp0").program[find(plan, "pp0", "embed.R@0")].parts
    load = Part("load@0 again", Load("inputs"), 0, (), ("y@0",), ("x@0",))
    parts = (load, replace(again, reads=("y@0",), frees=("y@0",)), weights)
    return with_peaks(change_instr(replace(plan, values=values), "pp0", "embed.R@0", parts=parts))


@breaks("R33-recompute", "both F and R write saved0")
def _two_writers(plan: Plan) -> Plan:
    unused = change_variant(plan, "F", writes=("out0", "out1", "saved0")).variants[0]
    return replace(plan, variants=(*plan.variants, replace(unused, keep="other")))


@breaks("R33-recompute", "F keeps saved1, which no step reads")
def _kept_in_vain(plan: Plan) -> Plan:
    unused = change_variant(plan, "F", writes=("out0", "out1", "saved1")).variants[0]
    ports = {**unused.ports, "saved1": unused.ports["saved0"]}
    return replace(plan, variants=(*plan.variants, replace(unused, keep="other", ports=ports)))


@breaks("R33-recompute", "W reads saved0, which neither F nor R writes")
def _no_writer(plan: Plan) -> Plan:
    unused = change_variant(plan, "R", writes=()).variants[0]
    return replace(plan, variants=(*plan.variants, replace(unused, keep="other")))


@breaks("R33-recompute", "R reads tan0, which is neither an input nor kept by F")
def _too_late(plan: Plan) -> Plan:
    unused = change_variant(plan, "R", reads=("in0", "tan0")).variants[0]
    return replace(plan, variants=(*plan.variants, replace(unused, keep="other")))


@breaks("R33-recompute", "its inputs or outputs are not those of the chunk")
def _other_inputs(plan: Plan) -> Plan:
    (variant,) = plan.variants
    return replace(
        plan,
        variants=(
            variant,
            replace(variant, keep="other", inputs=(*variant.inputs, variant.inputs[0])),
        ),
    )


breaks("R06-names", "the variant ghost~inputs is under no policy, or of no chunk of the plan")(
    lambda plan: replace(plan, variants=(*plan.variants, replace(plan.variants[0], id="ghost")))
)
breaks("R06-names", "spare~inputs stands among the chunks, which keep all")(
    lambda plan: replace(
        plan, chunks=(*plan.chunks, replace(plan.chunks[0], id="spare", keep="inputs"))
    )
)
breaks("R06-names", "there is no chunk embed~ghost")(
    lambda plan: change_part(plan, "pp0", "embed.F@0", op=Compute("embed", "F", "ghost"))
)


@breaks("R21-steps", "R of chunk embed runs 0 times for microbatch 0; 1 expected")
def _nothing_again(plan: Plan) -> Plan:
    """The other variant keeps all that the first does not, and asks for R nonetheless."""
    steps = {
        **plan.variants[0].steps,
        "F": plan.chunks[0].steps["F"],
        "R": Signature(("in0",), ("saved1",)),
    }
    ports = {**plan.chunks[0].ports, "saved1": plan.chunks[0].ports["saved0"]}
    good = good_plan()
    good = replace(good, variants=(replace(plan.variants[0], steps=steps, ports=ports),))
    good = change_part(good, "pp0", "embed.F@0", op=Compute("embed", "F", "inputs"))
    return change_part(good, "pp0", "embed.W@0", op=Compute("embed", "W", "inputs"))


def test_the_plan_is_good_and_can_be_written() -> None:
    assert check(GOOD) == []
    assert loads(Plan, dumps(GOOD)) == GOOD
    assert "R embed keeping inputs @0 reads x@0 writes s@0" in format_plan(GOOD)


def test_one_fault_breaks_one_rule() -> None:
    breaks.check()
