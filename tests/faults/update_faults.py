"""Faults of a compiler in reductions, updates, placement and mixed precision; see tests/faults/plan_faults.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from piper_ir.plan.plan import Instr, Part, Plan, RolePlan
from piper_ir.plan.plan_bytes import flat_bytes
from piper_ir.program.ops import Seed, SquaredNorm, Update
from tests.faults.plan_faults import Change
from tests.helpers.plan_edits import (
    bucket_of,
    channel_of,
    every_part,
    first_part,
    inserted,
    instructions,
    reduction,
    with_instr,
    with_op,
    with_program,
    without,
)


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


def unscale_in_places(plan: Plan) -> Plan | None:
    """One role does not divide gradients by the scale of the loss."""

    def unscales(role: RolePlan, part: Part) -> bool:
        return isinstance(part.op, Update) and part.op.scaled

    return first_part(
        plan, unscales, lambda p: with_op(replace(p, reads=p.reads[:-1]), scaled=False)
    )


def unscaled_microbatch(plan: Plan) -> Plan | None:
    """The loss of one microbatch is not scaled."""

    def scales(role: RolePlan, part: Part) -> bool:
        return isinstance(part.op, Seed) and part.op.scaled

    return first_part(plan, scales, lambda p: with_op(p, scaled=False))


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


UPDATES: tuple[Change, ...] = (
    drop_reduction, double_reduction, lonely_reduction, reduce_over_roles_only, reductions_in_other_order, tied_copies_apart,
    forget_bucket, forget_clip, unscale_in_places, unscaled_microbatch, forget_weight, tied_twice_in_norm,
    norm_before_reduction, overlapping_gradients, wrong_group,
    wrong_rank_order, lost_parameter, lost_master, narrow_master, narrow_gradients, wide_copy,
)  # fmt: skip
