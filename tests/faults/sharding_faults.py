"""Faults of a compiler in what ranks share: changes of a finished plan, as a wrong pass would have made it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from piper_ir.plan.plan import Instr, Part, Plan, RolePlan
from piper_ir.program.ops import Collective, Fold, Fresh, Op, SquaredNorm
from tests.helpers.plan_edits import instructions, with_instr

Change = Callable[[Plan], Plan | None]


def _is_gather(part: Part) -> bool:
    return isinstance(part.op, Collective) and part.op.kind == "all_gather"


def _is_scatter(part: Part) -> bool:
    return isinstance(part.op, Collective) and part.op.kind == "reduce_scatter"


def _with_part(plan: Plan, role: RolePlan, k: int, old: Part, new: Part) -> Plan:
    instr = role.program[k]
    return with_instr(
        plan, role, k, replace(instr, parts=tuple(new if p is old else p for p in instr.parts))
    )


def _on_another_bucket(
    plan: Plan, chosen: Callable[[Part], bool], op: Callable[[Op, str], Op]
) -> Plan | None:
    """Let the first chosen part work on another bucket of the same size that its role holds."""
    for role, k, instr in instructions(plan, lambda i: any(chosen(p) for p in i.parts)):
        part = next(p for p in instr.parts if chosen(p))
        assert isinstance(part.op, Collective | Fold | Fresh)
        own = plan.bucket(part.op.bucket)
        for other in plan.buckets:
            if (
                other.id != own.id
                and role.role in other.roles
                and (other.numel, other.dtype) == (own.numel, own.dtype)
            ):
                return _with_part(plan, role, k, part, replace(part, op=op(part.op, other.id)))
    return None


def gather_of_another_bucket(plan: Plan) -> Plan | None:
    """A gather brings the parameters of another bucket."""
    return _on_another_bucket(
        plan, lambda p: _is_gather(p) and bool(p.writes), lambda op, b: replace(op, bucket=b)
    )


def fold_into_another_bucket(plan: Plan) -> Plan | None:
    """A sum of gradients is added to another bucket."""
    return _on_another_bucket(plan, lambda p: isinstance(p.op, Fold), lambda op, b: Fold(b))


def buffer_of_another_bucket(plan: Plan) -> Plan | None:
    """A buffer for gradients is made for another bucket."""
    return _on_another_bucket(plan, lambda p: isinstance(p.op, Fresh), lambda op, b: Fresh(b))


def step_without_gathered_parameters(plan: Plan) -> Plan | None:
    """A step holds no gathered parameters."""
    for role, k, instr in instructions(plan, lambda i: any(p.held for p in i.parts)):
        part = next(p for p in instr.parts if p.held)
        return _with_part(plan, role, k, part, replace(part, held=part.held[1:]))
    return None


def _same_bucket_twice(
    plan: Plan, chosen: Callable[[Part], bool], bucket: Callable[[Part], str]
) -> Plan | None:
    """Let the second chosen part of a bucket read what the first one reads."""
    for role in plan.roles:
        first: dict[str, Part] = {}
        for k, instr in enumerate(role.program):
            for part in instr.parts:
                if chosen(part):
                    known = first.setdefault(bucket(part), part)
                    if known is not part:
                        return _with_part(
                            plan, role, k, part, replace(part, reads=known.reads, frees=())
                        )
    return None


def folded_twice(plan: Plan) -> Plan | None:
    """One sum of gradients is added twice, and another never."""
    return _same_bucket_twice(
        plan,
        lambda p: isinstance(p.op, Fold),
        lambda p: p.op.bucket if isinstance(p.op, Fold) else "",
    )


def _without_waits(plan: Plan, chosen: Callable[[Instr], bool]) -> Plan | None:
    for role, k, instr in instructions(plan, lambda i: chosen(i) and bool(i.waits)):
        return with_instr(plan, role, k, replace(instr, waits=()))
    return None


def scatter_before_the_last_gradient(plan: Plan) -> Plan | None:
    """A scatter does not wait for who adds to its buffer last."""
    return _without_waits(plan, lambda i: i.comm and _is_scatter(i.parts[0]))


def use_before_the_gather(plan: Plan) -> Plan | None:
    """Compute does not wait for gathers."""
    roles = []
    for role in plan.roles:
        streams = {i.stream for i in role.program if i.comm and _is_gather(i.parts[0])}
        kept = tuple(
            replace(i, waits=tuple(w for w in i.waits if w[0] not in streams)) for i in role.program
        )
        roles.append(replace(role, program=kept))
    changed = replace(plan, roles=tuple(roles))
    return changed if changed != plan else None


def fold_before_the_scatter(plan: Plan) -> Plan | None:
    """Folds do not wait for scatters."""
    for role, k, instr in instructions(
        plan, lambda i: any(isinstance(p.op, Fold) for p in i.parts) and bool(i.waits)
    ):
        streams = {i.stream for i in role.program if i.comm and _is_scatter(i.parts[0])}
        waits = tuple(w for w in instr.waits if w[0] not in streams)
        if waits != instr.waits:
            return with_instr(plan, role, k, replace(instr, waits=waits))
    return None


def norm_of_the_own_part(plan: Plan) -> Plan | None:
    """The norm is not summed over the ranks that share gradients."""
    if not any(b.shard.optim for b in plan.buckets) or not any(
        c.id == "norm" and c.over for c in plan.channels
    ):
        return None
    channels = tuple(replace(c, over=()) if c.id == "norm" else c for c in plan.channels)
    return replace(plan, channels=channels)


def norm_of_whole_buckets_once(plan: Plan) -> Plan | None:
    """The part of one rank alone counts in the norm, as if all had the same."""
    axes = next((b.shard.optim for b in plan.buckets if b.shard.optim), ())
    for role, k, instr in instructions(
        plan, lambda i: bool(axes) and any(isinstance(p.op, SquaredNorm) for p in i.parts)
    ):
        part = next(p for p in instr.parts if isinstance(p.op, SquaredNorm))
        assert isinstance(part.op, SquaredNorm)
        return _with_part(
            plan, role, k, part, replace(part, op=replace(part.op, once=part.op.buckets, over=axes))
        )
    return None


def _changed_bucket(plan: Plan, **fields: object) -> Plan | None:
    shared = next((b for b in plan.buckets if b.shard.optim), None)
    if shared is None:
        return None
    return replace(
        plan, buckets=tuple(replace(b, **fields) if b is shared else b for b in plan.buckets)
    )


def shared_along_another_axis(plan: Plan) -> Plan | None:
    """A bucket is said to be shared along an axis along which it is not replicated."""
    shared = next((b for b in plan.buckets if b.shard.optim), None)
    return (
        None
        if shared is None
        else _changed_bucket(plan, shard=replace(shared.shard, optim=("pp",)))
    )


def whole_states(plan: Plan) -> Plan | None:
    """A rank keeps all of the parameters of a bucket that it shares."""
    shared = {b.id for b in plan.buckets if b.shard.params}
    for role in plan.roles:
        for state in role.states:
            if state.category == "param" and state.flat and state.name in shared:
                states = tuple(
                    replace(s, nbytes=2 * s.nbytes) if s is state else s for s in role.states
                )
                return replace(
                    plan,
                    roles=tuple(replace(r, states=states) if r is role else r for r in plan.roles),
                )
    return None


def scattered_among_others(plan: Plan) -> Plan | None:
    """A bucket's channel for scatters joins other ranks."""
    shared = next(
        (
            b
            for b in plan.buckets
            if b.scatter and any(c.over == () for c in plan.channels if c.kind == "group")
        ),
        None,
    )
    if shared is None:
        return None
    other = next(c.id for c in plan.channels if c.kind == "group" and c.over == ())
    return _changed_bucket(plan, scatter=(other,) * len(shared.roles))


SHARDING: tuple[Change, ...] = (
    gather_of_another_bucket, fold_into_another_bucket, buffer_of_another_bucket, step_without_gathered_parameters, folded_twice,
    scatter_before_the_last_gradient, use_before_the_gather, fold_before_the_scatter, norm_of_the_own_part,
    norm_of_whole_buckets_once, shared_along_another_axis, whole_states, scattered_among_others,
)  # fmt: skip
