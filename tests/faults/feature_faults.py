"""Faults of a compiler in experts that devices cut, in states over cp, on the host or whole, and in stages without layers.

Changes of a finished plan, as a wrong pass would have made it. tests/faults/mutants.py tries them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from piper_ir.plan.plan import Bucket, Part, Plan, State
from piper_ir.program.collectives import FROM_HOST
from piper_ir.program.layout import DimPart, StepCollective
from piper_ir.program.ops import Collective, Compute
from piper_ir.program.program import Param
from tests.faults.plan_faults import Change
from tests.helpers.plan_edits import (
    every_part,
    instructions,
    with_instr,
    with_op,
    with_program,
    without,
)


def _cut_axis(plan: Plan) -> str:
    """The axis along which devices cut each expert; "" where experts are whole."""
    for param in plan.params:
        inner = [part.axis for part in param.layout if part.dim > 0]
        if inner and any(part.dim == 0 and part.axis in plan.experts for part in param.layout):
            return inner[0]
    return ""


def _other_layouts(plan: Plan, change: Callable[[DimPart], tuple[DimPart, ...]]) -> Plan | None:
    """The plan with other parts of experts along the axis that cuts them."""
    axis = _cut_axis(plan)

    def changed(param: Param) -> Param:
        if not any(part.axis in plan.experts and part.axis != axis for part in param.layout):
            return param
        parts = [change(part) if part.axis == axis else (part,) for part in param.layout]
        return replace(param, layout=tuple(part for some in parts for part in some))

    params = tuple(map(changed, plan.params)) if axis else plan.params
    return replace(plan, params=params) if params != plan.params else None


def cut_experts_said_to_be_whole(plan: Plan) -> Plan | None:
    """Experts of which each device has a part of the hidden elements are said to be whole there."""
    return _other_layouts(plan, lambda part: ())


def cut_between_experts(plan: Plan) -> Plan | None:
    """The devices that cut each expert are said to have other experts each."""
    return _other_layouts(plan, lambda part: (replace(part, dim=0),))


def cut_along_another_dimension(plan: Plan) -> Plan | None:
    """The first matrix of an expert is said to be cut by rows, and the second by columns."""
    return _other_layouts(plan, lambda part: (replace(part, dim=3 - part.dim),))


def _other_collectives(
    plan: Plan, change: Callable[[StepCollective, str], StepCollective | None]
) -> Plan | None:
    """The plan with other collectives in the forwards of experts that devices cut."""
    axis, chunks = _cut_axis(plan), []
    for chunk in plan.chunks:
        if axis and chunk.experts and "F" in chunk.steps:
            sig = chunk.steps["F"]
            kept = tuple(c for one in sig.collectives if (c := change(one, axis)) is not None)
            chunk = replace(chunk, steps={**chunk.steps, "F": replace(sig, collectives=kept)})
        chunks.append(chunk)
    return replace(plan, chunks=tuple(chunks)) if tuple(chunks) != plan.chunks else None


def halves_of_experts_not_added(plan: Plan) -> Plan | None:
    """The results of the parts of an expert are not added up."""
    return _other_collectives(plan, lambda one, _: None if one.kind == "reduce_scatter" else one)


def halves_added_among_other_experts(plan: Plan) -> Plan | None:
    """The results of the parts of an expert are added up among devices with other experts."""

    def elsewhere(one: StepCollective, axis: str) -> StepCollective:
        other = next(a for a in plan.experts if a != axis)
        return replace(one, axis=other) if one.kind == "reduce_scatter" else one

    return _other_collectives(plan, elsewhere)


def rows_exchanged_among_who_cuts(plan: Plan) -> Plan | None:
    """Rows are exchanged among the devices that have parts of the same experts."""
    return _other_collectives(
        plan, lambda one, axis: replace(one, axis=axis) if one.kind == "all_to_all" else one
    )


def _buckets(
    plan: Plan, wanted: Callable[[Bucket], bool], change: Callable[[Bucket], Bucket]
) -> Plan | None:
    """The plan with the first wanted bucket changed."""
    found = next((b for b in plan.buckets if wanted(b)), None)
    if found is None:
        return None
    changed = change(found)
    buckets = tuple(changed if b is found else b for b in plan.buckets)
    return replace(plan, buckets=buckets) if changed != found else None


def parts_of_experts_are_replicas(plan: Plan) -> Plan | None:
    """The bucket of experts that devices cut is said to be the same on these devices."""
    axis = _cut_axis(plan)
    return _buckets(
        plan,
        lambda b: bool(axis) and axis in b.parts and bool({*b.parts} & {*plan.experts}),
        lambda b: replace(b, parts=tuple(a for a in b.parts if a != axis)),
    )


def parts_of_experts_added_up(plan: Plan) -> Plan | None:
    """The gradients of different parts of an expert are added up."""
    axis = _cut_axis(plan)
    found = next(
        (b for b in plan.buckets if axis and axis in b.parts and b.over and b.channel), None
    )
    if found is None:
        return None
    over = (*found.over, axis)
    channels = [replace(c, over=over) if c.id == found.channel else c for c in plan.channels]
    buckets = [replace(b, over=over) if b.channel == found.channel else b for b in plan.buckets]
    return replace(plan, channels=tuple(channels), buckets=tuple(buckets))


def _over_cp(plan: Plan) -> Callable[[Bucket], bool]:
    return lambda b: "cp" in b.shard.optim and plan.mesh.size("cp") > 1 and len(b.shard.optim) > 1


def states_shared_without_cp(plan: Plan) -> Plan | None:
    """States that ranks share over dp and cp are said to be shared over dp alone."""

    def less(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(a for a in axes if a != "cp")

    return _buckets(
        plan,
        _over_cp(plan),
        lambda b: replace(
            b,
            shard=replace(
                b.shard,
                optim=less(b.shard.optim),
                grads=less(b.shard.grads),
                params=less(b.shard.params),
            ),
        ),
    )


def scattered_without_cp(plan: Plan) -> Plan | None:
    """Gradients are scattered over dp alone, where states are shared over cp, too."""
    found = next((b for b in plan.buckets if _over_cp(plan)(b) and b.scatter), None)
    if found is None:
        return None
    channels = tuple(
        replace(c, over=tuple(a for a in c.over if a != "cp")) if c.id in found.scatter else c
        for c in plan.channels
    )
    return replace(plan, channels=channels)


def gathered_along_cp_alone(plan: Plan) -> Plan | None:
    """Parameters are gathered along cp alone, where they are shared over dp, too."""
    found = next((b for b in plan.buckets if _over_cp(plan)(b) and b.gather), None)
    if found is None:
        return None
    channels = tuple(replace(c, over=("cp",)) if c.id in found.gather else c for c in plan.channels)
    return replace(plan, channels=channels)


def gradients_over_cp_not_terms(plan: Plan) -> Plan | None:
    """Gradients of which each device along cp has the term of its tokens are said to be the same there."""
    return _buckets(
        plan,
        lambda b: _over_cp(plan)(b),
        lambda b: replace(b, over=tuple(a for a in b.over if a != "cp")),
    )


def _other_states(
    plan: Plan, wanted: Callable[[State], bool], change: Callable[[State], State | None]
) -> Plan | None:
    """The plan with the first wanted state of each role changed, or without it."""
    roles, found = [], False
    for role in plan.roles:
        first = next((s for s in role.states if wanted(s)), None)
        found = found or first is not None
        states = [change(s) if s is first else s for s in role.states]
        roles.append(replace(role, states=tuple(s for s in states if s is not None)))
    return replace(plan, roles=tuple(roles)) if found else None


def state_of_the_host_on_the_device(plan: Plan) -> Plan | None:
    """A state of the optimizer that is on the host is counted on the device."""
    return _other_states(
        plan, lambda s: s.host and s.category == "optim", lambda s: replace(s, host=False)
    )


def master_on_the_device(plan: Plan) -> Plan | None:
    """A state of a bucket that is on the host is forgotten, and nothing holds it."""
    return _other_states(plan, lambda s: s.host, lambda s: None)


def bucket_on_the_device(plan: Plan) -> Plan | None:
    """A bucket whose optimizer is on the host is said to be updated on the device."""
    return _buckets(plan, lambda b: bool(b.host), lambda b: replace(b, host=type(b.host)()))


def parameters_brought_for_another_bucket(plan: Plan) -> Plan | None:
    """The parameters of another bucket come from the host."""
    for role, k, instr in instructions(plan, lambda i: i.stream == FROM_HOST):
        part = instr.parts[0]
        if not isinstance(part.op, Collective) or not part.op.bucket:
            continue
        for other in plan.buckets:
            if other.id != part.op.bucket and role.role in other.roles and other.host:
                brought = replace(instr, parts=(with_op(part, bucket=other.id),))
                return with_instr(plan, role, k, brought)
    return None


def read_before_they_come(plan: Plan) -> Plan | None:
    """Steps do not wait for parameters that come from the host."""
    roles = []
    for role in plan.roles:
        brought = any(
            i.stream == FROM_HOST and isinstance(i.parts[0].op, Collective) and i.parts[0].op.bucket
            for i in role.program
        )
        kept = tuple(
            replace(i, waits=tuple(w for w in i.waits if w[0] != FROM_HOST)) if brought else i
            for i in role.program
        )
        roles.append(replace(role, program=kept))
    changed = replace(plan, roles=tuple(roles))
    return changed if changed != plan else None


def _small(bucket: Bucket, plan: Plan) -> bool:
    """Whether parameters of a bucket are whole where those of others are shared."""
    others = any(b.shard.params for b in plan.buckets)
    return others and bool(bucket.shard.optim) and not bucket.shard.params


def small_parameters_said_to_be_shared(plan: Plan) -> Plan | None:
    """A bucket of small parameters, which are whole on each rank, is said to be shared like others."""
    return _buckets(
        plan,
        lambda b: _small(b, plan),
        lambda b: replace(b, shard=replace(b.shard, params=b.shard.optim)),
    )


def small_parameters_not_gathered(plan: Plan) -> Plan | None:
    """Small parameters, of which each rank updates a part, are not gathered after the update."""
    small = {b.id for b in plan.buckets if _small(b, plan)}
    for role, k, instr in instructions(plan, lambda i: i.comm):
        op = instr.parts[0].op
        if isinstance(op, Collective) and op.kind == "all_gather" and op.bucket in small:
            return with_program(plan, role, without(role, k))
    return None


def _relay(plan: Plan, step: str, mb: int) -> Part | None:
    """The part in which a stage without layers hands on an activation ("F") or a gradient ("I") of a microbatch."""
    for _, _, instr in plan.instructions():
        for part in instr.parts:
            op = part.op
            if isinstance(op, Compute) and op.chunk.startswith("empty") and op.step == step:
                if part.mb == mb:
                    return part
    return None


def _relaying(plan: Plan, wrong: Part | None, of: Part | None) -> Plan | None:
    """The plan in which one such part reads what another one reads."""
    if wrong is None or of is None:
        return None
    return every_part(plan, lambda _, p: p == wrong, lambda p: replace(p, reads=of.reads))


def relay_of_another_microbatch(plan: Plan) -> Plan | None:
    """A stage without layers hands on the activation of the microbatch before."""
    return _relaying(plan, _relay(plan, "F", 1), _relay(plan, "F", 0))


def relay_of_the_activation(plan: Plan) -> Plan | None:
    """A stage without layers hands back the activation in place of its gradient."""
    return _relaying(plan, _relay(plan, "I", 0), _relay(plan, "F", 0))


def relay_before_it_comes(plan: Plan) -> Plan | None:
    """A stage without layers does not wait for what it hands on."""
    relay = _relay(plan, "F", 1)
    for role, k, instr in instructions(plan, lambda i: relay is not None and relay in i.parts):
        return with_instr(plan, role, k, replace(instr, waits=()))
    return None


FEATURES: tuple[Change, ...] = (
    cut_experts_said_to_be_whole, cut_between_experts, cut_along_another_dimension, halves_of_experts_not_added,
    halves_added_among_other_experts, rows_exchanged_among_who_cuts, parts_of_experts_are_replicas,
    parts_of_experts_added_up, states_shared_without_cp, scattered_without_cp, gathered_along_cp_alone,
    gradients_over_cp_not_terms, state_of_the_host_on_the_device, master_on_the_device, bucket_on_the_device,
    parameters_brought_for_another_bucket, read_before_they_come, small_parameters_said_to_be_shared,
    small_parameters_not_gathered, relay_of_another_microbatch, relay_of_the_activation,
    relay_before_it_comes,
)  # fmt: skip
