"""Faults of a compiler: changes of a finished plan, as a wrong pass would have made it. tests/faults/mutants.py tries
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from piper_ir.plan.plan import COMPUTE, Part, Plan, RolePlan
from piper_ir.program.ops import Add, Load, Recv, Seed, Send, Update
from tests.helpers.plan_edits import (
    bucket_of,
    every_part,
    first_part,
    inserted,
    instructions,
    is_step,
    reduction,
    with_instr,
    with_op,
    with_program,
    without,
)

Change = Callable[[Plan], Plan | None]
"""The faulty plan; None where the plan offers no place for the fault."""


# --- faults of a compiler: waits


def no_receive_wait(plan: Plan) -> Plan | None:
    """The first compute instruction that waits for a receive does not."""
    for role, k, instr in instructions(plan, lambda i: i.stream == COMPUTE and bool(i.waits)):
        receives = {i.stream for i in role.program if isinstance(i.parts[0].op, Recv)}
        waits = tuple(w for w in instr.waits if w[0] not in receives)
        if waits != instr.waits:
            return with_instr(plan, role, k, replace(instr, waits=waits))
    return None


def no_send_wait(plan: Plan) -> Plan | None:
    """Sends do not wait for what they send."""
    roles = [
        replace(
            r,
            program=tuple(
                replace(i, waits=()) if isinstance(i.parts[0].op, Send) else i for i in r.program
            ),
        )
        for r in plan.roles
    ]
    return replace(plan, roles=tuple(roles)) if tuple(roles) != plan.roles else None


def no_reduction_wait(plan: Plan) -> Plan | None:
    """Update and the gradient norm do not wait for reductions."""
    out, hit = plan, False
    for role in plan.roles:
        streams = {i.stream for i in role.program if bucket_of(i)}
        program = [
            replace(i, waits=tuple(w for w in i.waits if w[0] not in streams))
            if i.stream == COMPUTE
            else i
            for i in role.program
        ]
        hit = hit or tuple(program) != role.program
        out = with_program(out, role, program)
    return out if hit else None


def reduce_early(plan: Plan) -> Plan | None:
    """A bucket's reduction starts before the last microbatch, on every member."""
    buckets = [b for b in plan.buckets if b.channel]
    if not buckets or plan.microbatches < 2:
        return None
    out = plan
    for role in [r for r in plan.roles if r.role in buckets[0].roles]:
        k = reduction(role, buckets[0].id)
        last = [
            k
            for k, i in enumerate(role.program)
            if any(p.mb == plan.microbatches - 1 and is_step(p, "W") for p in i.parts)
        ]
        waits = ((COMPUTE, sum(i.stream == COMPUTE for i in role.program[: last[0]])),)
        out = with_program(
            out, role, inserted(without(role, k), last[0], replace(role.program[k], waits=waits))
        )
    return out


# --- memory


def free_early(plan: Plan) -> Plan | None:
    """A saved tensor dies with the forward that writes it."""

    def saved(part: Part) -> list[str]:
        return [v for v in part.writes if ":saved" in v]

    return first_part(
        plan,
        lambda r, p: is_step(p, "F") and bool(saved(p)),
        lambda p: replace(p, frees=(*p.frees, saved(p)[0])),
    )


def free_never(plan: Plan) -> Plan | None:
    """A value is not freed."""
    return first_part(
        plan,
        lambda r, p: is_step(p, "W") and bool(p.frees),
        lambda p: replace(p, frees=p.frees[1:]),
    )


def free_twice(plan: Plan) -> Plan | None:
    """A value is freed by its last reader and again by Update."""
    home, victim = next(
        (r, p.frees[0]) for r, _, i in plan.instructions() for p in i.parts if p.frees
    )
    return first_part(
        plan,
        lambda r, p: isinstance(p.op, Update) and r is home,
        lambda p: replace(p, frees=(*p.frees, victim)),
    )


def free_while_sent(plan: Plan) -> Plan | None:
    """What is being sent is freed by its writer."""
    sent = {
        v
        for _, _, i in plan.instructions()
        if isinstance(i.parts[0].op, Send)
        for v in i.parts[0].reads
    }
    early = {
        v
        for _, _, i in plan.instructions()
        for p in i.parts
        if is_step(p, "F")
        for v in p.writes
        if v in sent
    }
    out = every_part(
        plan,
        lambda r, p: bool(early & {*p.writes}),
        lambda p: replace(p, frees=(*p.frees, *(v for v in p.writes if v in early))),
    )
    if out is None:
        return None
    for role, k, instr in instructions(out, lambda i: bool(early & {*i.frees_before})):
        later = tuple(v for v in instr.frees_before if v not in early)
        out = with_instr(out, out.role(role.role), k, replace(instr, frees_before=later))
    return out


def no_buffer(plan: Plan) -> Plan | None:
    """A receive has no buffer."""
    for role, k, instr in instructions(plan, lambda i: bool(i.allocs_after)):
        return with_instr(plan, role, k, replace(instr, allocs_after=instr.allocs_after[1:]))
    return None


# --- values


def _swap_values(plan: Plan, a: str, b: str, wanted: Callable[[Part], bool]) -> Plan | None:
    pair = {a: b, b: a}

    def swapped(part: Part) -> Part:
        return replace(part, reads=tuple(pair.get(v, v) for v in part.reads))

    return every_part(plan, lambda r, p: wanted(p) and bool(pair.keys() & {*p.reads}), swapped)


def wrong_skip_tensor(plan: Plan) -> Plan | None:
    """Two values of equal shape that one role sends change places."""
    for role in plan.roles:
        sent = [
            i.parts[0].reads[0]
            for i in role.program
            if isinstance(i.parts[0].op, Send) and i.parts[0].mb == 0
        ]
        for a, b in pairwise(sent):
            if (
                plan.values[a].spec == plan.values[b].spec
                and plan.values[a].category == plan.values[b].category
            ):
                return _swap_values(plan, a, b, lambda p: isinstance(p.op, Send))
    return None


def stale_saved_tensor(plan: Plan) -> Plan | None:
    """Backwards of microbatches 0 and 1 read each other's saved tensors."""
    saved = [
        v for v in plan.values if ":saved" in v and v.endswith("@0") and f"{v[:-1]}1" in plan.values
    ]
    return (
        _swap_values(
            plan, saved[0], f"{saved[0][:-1]}1", lambda p: is_step(p, "W") or is_step(p, "I")
        )
        if saved
        else None
    )


def swap_inputs(plan: Plan) -> Plan | None:
    """Microbatches 0 and 1 load each other's inputs, not their targets."""

    def input_of_two(role: RolePlan, part: Part) -> bool:
        return (
            isinstance(part.op, Load) and part.op.tensor.startswith("inputs") and part.mb in (0, 1)
        )

    return (
        every_part(plan, input_of_two, lambda p: replace(p, mb=1 - p.mb))
        if plan.microbatches > 1
        else None
    )


def same_rows(plan: Plan) -> Plan | None:
    """Every microbatch loads the rows of the first."""
    return every_part(
        plan, lambda r, p: isinstance(p.op, Load) and p.mb > 0, lambda p: replace(p, mb=0)
    )


def crossed_channel(plan: Plan) -> Plan | None:
    """The receiver expects two messages in the other order."""
    for role in plan.roles:
        found = [k for k, i in enumerate(role.program) if isinstance(i.parts[0].op, Recv)]
        for a, b in pairwise(found):
            x, y = role.program[a], role.program[b]
            if x.parts[0].op == y.parts[0].op:
                program = list(role.program)
                program[a], program[b] = replace(x, parts=y.parts), replace(y, parts=x.parts)
                return with_program(plan, role, program)
    return None


def _sums_gradients(role: RolePlan, part: Part) -> bool:
    return isinstance(part.op, Add) and part.mb >= 0


def lose_operand(plan: Plan) -> Plan | None:
    """A sum of gradients leaves out an operand."""
    return every_part(plan, _sums_gradients, lambda p: replace(p, reads=p.reads[:-1]))


def double_operand(plan: Plan) -> Plan | None:
    """A sum of gradients takes one operand twice."""
    return every_part(
        plan, _sums_gradients, lambda p: replace(p, reads=(p.reads[0],) * len(p.reads))
    )


# --- compute


def _without_part(plan: Plan, wanted: Callable[[Part], bool]) -> Plan | None:
    for role, k, instr in instructions(
        plan, lambda i: len(i.parts) > 1 and any(wanted(p) for p in i.parts)
    ):
        gone = next(p for p in instr.parts if wanted(p))
        kept = [p for p in instr.parts if p is not gone]
        kept[-1] = replace(kept[-1], frees=(*kept[-1].frees, *gone.frees))
        return with_instr(plan, role, k, replace(instr, parts=tuple(kept)))
    return None


def skip_weight_gradient(plan: Plan) -> Plan | None:
    """The W of one microbatch does not run."""
    return _without_part(plan, lambda p: is_step(p, "W") and p.mb == plan.microbatches - 1)


def repeat_weight_gradient(plan: Plan) -> Plan | None:
    """The W of one microbatch runs twice."""
    for role, k, instr in instructions(plan, lambda i: any(is_step(p, "W") for p in i.parts)):
        at = next(n for n, p in enumerate(instr.parts) if is_step(p, "W"))
        parts = (*instr.parts[:at], replace(instr.parts[at], frees=()), *instr.parts[at:])
        return with_instr(plan, role, k, replace(instr, parts=parts))
    return None


def seed_without_scale(plan: Plan) -> Plan | None:
    """The loss of a microbatch counts in full."""
    return every_part(
        plan,
        lambda r, p: isinstance(p.op, Seed) and p.op.value != 1,
        lambda p: with_op(p, value=1.0),
    )


def seed_without_replicas(plan: Plan) -> Plan | None:
    """The mean is over the microbatches of one replica."""
    if plan.replicas == 1 or plan.loss_kind == "sum":
        return None
    return every_part(
        plan, lambda r, p: isinstance(p.op, Seed), lambda p: with_op(p, value=1 / plan.microbatches)
    )


def buffer_order(plan: Plan) -> Plan | None:
    """Two microbatches update a buffer in the other order."""
    if not any(o.kind == "buffer" for c in plan.chunks for o in c.outputs):
        return None
    for role in plan.roles:
        for k, (a, b) in enumerate(pairwise(role.program)):
            if all(
                i.stream == COMPUTE and not i.allocs_after and any(is_step(p, "F") for p in i.parts)
                for i in (a, b)
            ):
                return with_program(plan, role, [*role.program[:k], b, a, *role.program[k + 2 :]])
    return None


COMPILER: tuple[Change, ...] = (
    no_receive_wait, no_send_wait, no_reduction_wait, reduce_early, free_early, free_never, free_twice, free_while_sent,
    no_buffer, wrong_skip_tensor, stale_saved_tensor, swap_inputs, same_rows, crossed_channel, lose_operand, double_operand,
    skip_weight_gradient, repeat_weight_gradient, seed_without_scale, seed_without_replicas, buffer_order,
)  # fmt: skip
