"""Faults of a compiler in how devices share chunks: changes of a finished plan, as a wrong pass would have made it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from piper_ir.plan.plan import Bucket, Plan
from piper_ir.program.layout import StepCollective
from piper_ir.program.ops import SquaredNorm
from piper_ir.program.program import Chunk
from tests.helpers.plan_edits import first_part, with_op

Change = Callable[[Plan], Plan | None]


def _summed(plan: Plan) -> tuple[str, ...]:
    """The parameters whose gradients are terms of a sum over sharers."""
    return tuple(p.name for p in plan.params if p.summed)


def _with_channel_over(plan: Plan, bucket: Bucket, over: tuple[str, ...]) -> Plan:
    """The plan in which a bucket of its own channel is reduced along other axes."""
    channels = [replace(c, over=over) if c.id == bucket.channel else c for c in plan.channels]
    buckets = [replace(b, over=over) if b.channel == bucket.channel else b for b in plan.buckets]
    return replace(plan, channels=tuple(channels), buckets=tuple(buckets))


def terms_not_summed(plan: Plan) -> Plan | None:
    """The gradients of norms are summed over replicas, and not over the devices that share tokens."""
    found = next(
        (b for b in plan.buckets if set(b.params) & set(_summed(plan)) and len(b.over) > 1), None
    )
    over = () if found is None else tuple(a for a in found.over if a not in plan.shared)
    return None if found is None else _with_channel_over(plan, found, over)


def terms_unknown(plan: Plan) -> Plan | None:
    """Nothing says that the gradients of norms are terms of a sum."""
    plan_ = terms_not_summed(plan)
    while plan_ is not None and (more := terms_not_summed(plan_)) is not None:
        plan_ = more
    return (
        None
        if plan_ is None
        else replace(plan_, params=tuple(replace(p, summed=()) for p in plan_.params))
    )


def summed_twice(plan: Plan) -> Plan | None:
    """Gradients that each sharer has whole are added up over the sharers."""
    found = next((b for b in plan.buckets if b.over and not set(b.over) & set(plan.shared)), None)
    return None if found is None else _with_channel_over(plan, found, (*plan.shared, *found.over))


def terms_of_one_forgotten(plan: Plan) -> Plan | None:
    """One parameter of a bucket is said to have whole gradients."""
    many = next((b for b in plan.buckets if len(set(b.params) & set(_summed(plan))) > 1), None)
    if many is None:
        return None
    return replace(
        plan,
        params=tuple(replace(p, summed=()) if p.name == many.params[0] else p for p in plan.params),
    )


def norm_counts_copies(plan: Plan) -> Plan | None:
    """What all sharers have counts for each of them in the norm."""
    return _with_norm(plan, once=(), over=())


def norm_counts_once_along_nothing(plan: Plan) -> Plan | None:
    """The norm knows what counts once, and not among whom."""
    return _with_norm(plan, over=())


def _with_norm(plan: Plan, **fields: Any) -> Plan | None:
    if not plan.shared:
        return None
    return first_part(
        plan,
        lambda r, p: isinstance(p.op, SquaredNorm) and bool(p.op.once),
        lambda p: with_op(p, **fields),
    )


def norm_of_own_parts(plan: Plan) -> Plan | None:
    """The norm is not summed over the devices that have parts."""
    if not any(c.id == "norm" and set(c.over) & set(plan.shared) for c in plan.channels):
        return None
    apart = [
        replace(c, over=tuple(a for a in c.over if a not in plan.shared)) if c.id == "norm" else c
        for c in plan.channels
    ]
    return replace(plan, channels=tuple(apart))


def _with_param(plan: Plan, wanted: Callable[[Any], bool], **fields: Any) -> Plan | None:
    found = next((p for p in plan.params if p.layout and wanted(p.layout[0])), None)
    if found is None:
        return None
    return replace(
        plan, params=tuple(replace(p, **fields) if p is found else p for p in plan.params)
    )


def outer_dropped(plan: Plan) -> Plan | None:
    """The queries, keys and values of a fused weight are taken apart as one."""
    names = [p.name for p in plan.params if p.layout and p.layout[0].outer > 1]
    if not names:
        return None
    blocks = tuple(
        replace(p, layout=tuple(replace(part, outer=1) for part in p.layout))
        if p.name in names
        else p
        for p in plan.params
    )
    return replace(plan, params=blocks)


def layout_dropped(plan: Plan) -> Plan | None:
    """A parameter of which each device has a part is said to be whole."""
    return _with_param(plan, lambda part: True, layout=())


def along_the_other_dimension(plan: Plan) -> Plan | None:
    """A matrix is taken apart along its other dimension."""
    found = next((p for p in plan.params if len(p.layout) == 1 and len(p.spec.shape) == 2), None)
    if found is None:
        return None
    (part,) = found.layout
    return _with_param(
        plan, lambda p: p is part, layout=(replace(part, dim=1 - part.dim, outer=1),)
    )


def parts_forgotten(plan: Plan) -> Plan | None:
    """A bucket is said to be the same on all sharers."""
    found = next((b for b in plan.buckets if b.parts), None)
    return found and replace(
        plan, buckets=tuple(replace(b, parts=()) if b is found else b for b in plan.buckets)
    )


def sharers_forgotten(plan: Plan) -> Plan | None:
    """The plan does not say whose chunks are shared, so that the loss of each sharer counts."""
    return replace(plan, shared=()) if plan.shared else None


def sharers_are_replicas(plan: Plan) -> Plan | None:
    """Sharers of a chunk are given rows of their own."""
    return replace(plan, replicated=(*plan.shared, *plan.replicated)) if plan.shared else None


def _with_inside(plan: Plan, **fields: Any) -> Plan | None:
    inside = next((c for c in plan.channels if c.purpose == "tensor"), None)
    return inside and replace(
        plan, channels=tuple(replace(c, **fields) if c is inside else c for c in plan.channels)
    )


def meeting_of_replicas(plan: Plan) -> Plan | None:
    """Steps meet with replicas in place of sharers."""
    return _with_inside(plan, over=plan.replicated) if plan.replicated else None


def _with_exchanges(
    plan: Plan, wanted: Callable[[Chunk], bool], change: Callable[..., tuple[StepCollective, ...]]
) -> Plan | None:
    """The plan with other collectives in the forwards of the wanted chunks."""
    chunks = []
    for chunk in plan.chunks:
        forward = chunk.steps["F"]
        changed = (
            replace(forward, collectives=change(forward.collectives)) if wanted(chunk) else forward
        )
        chunks.append(replace(chunk, steps={**chunk.steps, "F": changed}))
    return replace(plan, chunks=tuple(chunks)) if tuple(chunks) != plan.chunks else None


def exchange_among_replicas(plan: Plan) -> Plan | None:
    """A step sums over replicas in place of sharers."""
    if not plan.replicated:
        return None
    return _with_exchanges(
        plan,
        lambda c: True,
        lambda all_: tuple(replace(one, axis=plan.replicated[0]) for one in all_),
    )


def exchange_left_out_of_a_layer(plan: Plan) -> Plan | None:
    """One of several equal layers leaves out a collective."""
    codes = [c.code for c in plan.chunks if c.steps["F"].collectives]
    twice = next((c.id for c in plan.chunks if codes.count(c.code) > 1), "")
    return _with_exchanges(plan, lambda c: c.id == twice, lambda all_: all_[1:])


def exchanges_left_out(plan: Plan) -> Plan | None:
    """Forwards leave out all collectives."""
    return _with_exchanges(plan, lambda c: True, lambda all_: ())


def weights_of_sharers(plan: Plan) -> Plan | None:
    """The weight of the loss is summed over sharers, who all have the same."""
    if not plan.shared or not any(c.purpose == "weight" for c in plan.channels):
        return None
    wide = [
        replace(c, over=(*plan.shared, *c.over)) if c.purpose == "weight" else c
        for c in plan.channels
    ]
    return replace(plan, channels=tuple(wide))


LAYOUTS: tuple[Change, ...] = (
    terms_not_summed, terms_unknown, summed_twice, terms_of_one_forgotten, norm_counts_copies, norm_counts_once_along_nothing,
    norm_of_own_parts, outer_dropped, layout_dropped, along_the_other_dimension, parts_forgotten, sharers_forgotten,
    sharers_are_replicas, meeting_of_replicas, exchange_among_replicas, exchange_left_out_of_a_layer,
    exchanges_left_out, weights_of_sharers,
)  # fmt: skip
