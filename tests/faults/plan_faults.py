"""Faults of a compiler: changes of a finished plan, as a wrong pass would have made it. tests/faults/mutants.py tries
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from piper_ir.plan.plan import COMPUTE, Instr, Part, Plan, RolePlan
from piper_ir.plan.plan_bytes import flat_bytes
from piper_ir.program.ops import Add, Load, Recv, Seed, Send, SquaredNorm, Update
from tests.helpers.plan_edits import (
    bucket_of,
    channel_of,
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


# --- reductions and updates


def drop_reduction(plan: Plan) -> Plan | None:
    """A bucket is not reduced, on any member."""
    buckets = [b for b in plan.buckets if b.channel]
    return _reductions(plan, buckets[0].id, lambda role, k: without(role, k)) if buckets else None


def double_reduction(plan: Plan) -> Plan | None:
    """A bucket is reduced twice, on all members."""
    buckets = [b for b in plan.buckets if b.channel]

    def again(role: RolePlan, k: int) -> list[Instr]:
        return inserted(list(role.program), k + 1, replace(role.program[k], waits=()))

    return _reductions(plan, buckets[-1].id, again) if buckets else None


def _reductions(
    plan: Plan, bucket: str, change: Callable[[RolePlan, int], list[Instr]], most: int = 99
) -> Plan:
    out = plan
    for role in [r for r in plan.roles if r.role in plan.bucket(bucket).roles][:most]:
        k = reduction(role, bucket)
        out = with_program(out, role, change(role, k))
    return out


def lonely_reduction(plan: Plan) -> Plan | None:
    """One role of several does not take part in the reduction of a tied parameter."""
    tied = [b for b in plan.buckets if len(b.roles) > 1]
    return _reductions(plan, tied[0].id, lambda role, k: without(role, k), most=1) if tied else None


def reduce_over_roles_only(plan: Plan) -> Plan | None:
    """The reduction of a tied parameter leaves out the replicas."""
    wrong = {c.id for c in plan.channels if c.purpose == "reduce" and c.over and len(c.roles) > 1}
    return (
        replace(
            plan, channels=tuple(replace(c, over=()) if c.id in wrong else c for c in plan.channels)
        )
        if wrong
        else None
    )


def reductions_in_other_order(plan: Plan) -> Plan | None:
    """One member of a channel reduces two buckets in the other order."""
    for channel in plan.channels:
        first = plan.role(channel.roles[0])
        used = [
            k for k, i in enumerate(first.program) if bucket_of(i) and channel_of(i) == channel.id
        ]
        if len(channel.roles) > 1 and len(used) > 1:
            program = list(first.program)
            a, b = program[used[0]], program[used[1]]
            program[used[0]], program[used[1]] = (
                replace(a, parts=b.parts, waits=b.waits),
                replace(b, parts=a.parts),
            )
            return with_program(plan, first, program)
    return None


def tied_copies_apart(plan: Plan) -> Plan | None:
    """A tied parameter's bucket has no channel: every holder keeps its own gradient."""
    tied = [b.id for b in plan.buckets if len(b.roles) > 1]
    if not tied:
        return None
    out = _reductions(plan, tied[0], lambda role, k: without(role, k))
    return replace(
        out, buckets=tuple(replace(b, channel="") if b.id == tied[0] else b for b in plan.buckets)
    )


def forget_bucket(plan: Plan) -> Plan | None:
    """Update leaves out a bucket."""
    for role, k, instr in instructions(plan, lambda i: isinstance(i.parts[-1].op, Update)):
        op = instr.parts[-1].op
        if isinstance(op, Update) and len(op.buckets) > 1:
            parts = (*instr.parts[:-1], with_op(instr.parts[-1], buckets=op.buckets[1:]))
            return with_instr(plan, role, k, replace(instr, parts=parts))
    return None


def forget_clip(plan: Plan) -> Plan | None:
    """One role does not clip."""

    def clips(role: RolePlan, part: Part) -> bool:
        return isinstance(part.op, Update) and part.op.clip is not None

    return first_part(plan, clips, lambda p: with_op(replace(p, reads=p.reads[:-1]), clip=None))


def forget_weight(plan: Plan) -> Plan | None:
    """Update does not divide by the sum of weights."""

    def divides(role: RolePlan, part: Part) -> bool:
        return isinstance(part.op, Update) and part.op.weighted

    return every_part(
        plan, divides, lambda p: with_op(replace(p, reads=p.reads[1:]), weighted=False)
    )


def tied_twice_in_norm(plan: Plan) -> Plan | None:
    """Every holder of a tied parameter adds it to the gradient norm."""
    tied = [b for b in plan.buckets if len(b.roles) > 1]
    for role, k, instr in plan.instructions():
        op = instr.parts[0].op
        if isinstance(op, SquaredNorm):
            more = tuple(b.id for b in tied if role.role in b.roles and b.id not in op.buckets)
            if more:
                return with_instr(
                    plan,
                    role,
                    k,
                    replace(instr, parts=(with_op(instr.parts[0], buckets=(*op.buckets, *more)),)),
                )
    return None


def norm_before_reduction(plan: Plan) -> Plan | None:
    """The gradient norm is taken of sums that are not there yet."""
    for role, k, instr in instructions(plan, lambda i: isinstance(i.parts[0].op, SquaredNorm)):
        first = next((n for n, i in enumerate(role.program) if bucket_of(i)), k)
        if first < k:
            return with_program(
                plan, role, inserted(without(role, k), first, replace(instr, waits=()))
            )
    return None


def overlapping_gradients(plan: Plan) -> Plan | None:
    """Two parameters of a bucket start at one place."""
    for n, bucket in enumerate(plan.buckets):
        if len(bucket.params) > 1:
            moved = replace(bucket, offsets=(*bucket.offsets[:-1], bucket.offsets[-2]))
            return replace(plan, buckets=(*plan.buckets[:n], moved, *plan.buckets[n + 1 :]))
    return None


def wrong_group(plan: Plan) -> Plan | None:
    """A bucket is stepped with the numbers of another parameter group."""
    groups = {b.group for b in plan.buckets}
    if len(groups) < 2:
        return None
    first = replace(
        plan.buckets[0], group=next(g for g in sorted(groups) if g != plan.buckets[0].group)
    )
    return replace(plan, buckets=(first, *plan.buckets[1:]))


# --- placement


def wrong_rank_order(plan: Plan) -> Plan | None:
    """Two roles stand on each other's ranks."""
    if len(plan.roles) < 2:
        return None
    a, b = plan.roles[0], plan.roles[1]
    return replace(
        plan, roles=(replace(a, ranks=b.ranks), replace(b, ranks=a.ranks), *plan.roles[2:])
    )


def lost_parameter(plan: Plan) -> Plan | None:
    """A role does not hold a parameter that it reads."""
    for role in plan.roles:
        for state in role.states:
            if state.id.startswith("param:") and state.id.removeprefix("param:") in {
                b.id for b in plan.buckets
            }:
                states = tuple(s for s in role.states if s.id != state.id)
                return replace(
                    plan,
                    roles=tuple(replace(r, states=states) if r is role else r for r in plan.roles),
                )
    return None


# --- mixed precision


def _mastered(plan: Plan) -> int | None:
    """The number of the first bucket with a master, if any."""
    return next((n for n, bucket in enumerate(plan.buckets) if bucket.mastered), None)


def _with_bucket(plan: Plan, n: int, **changes: str) -> Plan:
    bucket = replace(plan.buckets[n], **changes)  # type: ignore[arg-type]  # dtypes
    return replace(plan, buckets=(*plan.buckets[:n], bucket, *plan.buckets[n + 1 :]))


def lost_master(plan: Plan) -> Plan | None:
    """A role has no master of parameters that it computes with in a narrower dtype."""
    roles = [
        replace(r, states=tuple(s for s in r.states if s.category != "master")) for r in plan.roles
    ]
    return None if _mastered(plan) is None else replace(plan, roles=tuple(roles))


def narrow_master(plan: Plan) -> Plan | None:
    """The optimizer updates the parameters in the dtype of forward and backward."""
    n = _mastered(plan)
    return (
        None
        if n is None
        else _with_bucket(plan, n, dtype=plan.buckets[n].compute_dtype, compute="")
    )


def narrow_gradients(plan: Plan) -> Plan | None:
    """Gradients are summed and reduced in the dtype of forward and backward."""
    n = _mastered(plan)
    return None if n is None else _with_bucket(plan, n, reduce=plan.buckets[n].compute_dtype)


def wide_copy(plan: Plan) -> Plan | None:
    """Chunks read parameters of another dtype than they were captured in, with states of that size."""
    n = _mastered(plan)
    if n is None:
        return None
    plan, sizes = _with_bucket(plan, n, compute=""), flat_bytes(plan.buckets[n])
    states = [
        [
            replace(s, nbytes=sizes["master"])
            if (s.category, s.name) == ("param", plan.buckets[n].id)
            else s
            for s in r.states
        ]
        for r in plan.roles
    ]
    kept = [
        [s for s in of if (s.category, s.name) != ("master", plan.buckets[n].id)] for of in states
    ]
    return replace(
        plan,
        roles=tuple(replace(r, states=tuple(s)) for r, s in zip(plan.roles, kept, strict=True)),
    )


COMPILER: tuple[Change, ...] = (
    no_receive_wait, no_send_wait, no_reduction_wait, reduce_early, free_early, free_never, free_twice, free_while_sent,
    no_buffer, wrong_skip_tensor, stale_saved_tensor, swap_inputs, same_rows, crossed_channel, lose_operand, double_operand,
    skip_weight_gradient, repeat_weight_gradient, seed_without_scale, seed_without_replicas, buffer_order, drop_reduction,
    double_reduction, lonely_reduction, reduce_over_roles_only, reductions_in_other_order, tied_copies_apart, forget_bucket,
    forget_clip, forget_weight, tied_twice_in_norm, norm_before_reduction, overlapping_gradients, wrong_group,
    wrong_rank_order, lost_parameter, lost_master, narrow_master, narrow_gradients, wide_copy,
)  # fmt: skip
