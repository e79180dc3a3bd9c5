"""Check rule R37: the axes along which devices have different experts, chunks of experts, and who exchanges tokens."""

from __future__ import annotations

from collections.abc import Iterator

from piper_ir.ground.sizes import Affine
from piper_ir.plan.plan import Channel, Plan, RolePlan
from piper_ir.program.ops import Collective
from piper_ir.program.program import Chunk, Param
from piper_ir.verify.rules import Findings

RULE = "R37-experts"
PURPOSE = "expert"


def check_experts(findings: Findings) -> None:
    """Check R37."""
    plan = findings.plan
    params = {p.name: p for p in plan.params}
    for axis in plan.experts:
        for problem in _axis_problems(plan, axis):
            findings.add(RULE, f"devices have different experts along {axis}, {problem}")
    for chunk in (*plan.chunks, *plan.variants):
        for problem in _chunk_problems(plan, chunk, params):
            findings.add(RULE, f"chunk {chunk.variant} {problem}")
    for channel in plan.channels:
        if channel.purpose == PURPOSE and (problem := _channel_problem(plan, channel)):
            findings.add(RULE, f"channel {channel.id} {problem}")
    exchanges = any(channel.purpose == PURPOSE for channel in plan.channels)
    for role in plan.roles if plan.experts and exchanges else ():
        for index, problem in _use_problems(plan, role):
            findings.add(RULE, problem, role, index)


def _axis_problems(plan: Plan, axis: str) -> Iterator[str]:
    if plan.mesh.size(axis) < 2:
        yield f"and {plan.mesh} has no such axis"
    elif axis not in plan.replicated:
        yield (
            f"and rows are shared out along {', '.join(plan.replicated) or 'no axis'}; each device "
            f"needs rows of its own"
        )
    if axis in plan.shared:
        yield "and share the work of all chunks along it, too"


def _chunk_problems(plan: Plan, chunk: Chunk, params: dict[str, Param]) -> Iterator[str]:
    axes = set(plan.mesh.along(chunk.experts)) if chunk.experts else set()
    along = {
        part.axis for i in chunk.inputs if i.kind == "param" for part in params[i.ref].layout
    } & {*plan.experts, *axes}
    if chunk.experts and (not axes or not axes <= {*plan.experts, *plan.shared}):
        yield (
            f"has experts along {chunk.experts}; devices have different ones along "
            f"{', '.join(plan.experts) or 'no axis'}"
        )
    elif chunk.experts and not axes <= along:
        yield (
            f"has experts along {chunk.experts}, and its parameters have parts along "
            f"{', '.join(sorted(along)) or 'no axis'}"
        )
    elif along and not chunk.experts:
        yield (
            f"reads parameters of the experts of one device along {', '.join(along)}, and is not "
            f"said to compute them"
        )
    summed = {
        axis
        for one in (chunk.steps["F"].collectives if "F" in chunk.steps else ())
        if one.kind == "reduce_scatter"
        for axis in plan.mesh.along(one.axis)
    }
    if chunk.experts and (apart := along - axes - summed):
        yield (
            f"has experts along {chunk.experts}, its parameters have parts along {', '.join(sorted(apart))}, too, and "
            f"its step F adds nothing up along it"
        )
    for step, sig in chunk.steps.items():
        for one in sig.collectives if chunk.experts else ():
            if one.kind == "all_to_all" and set(plan.mesh.along(one.axis)) != axes:
                yield f"has experts along {chunk.experts}, and its step {step} exchanges rows along {one.axis}"
        if sig.experts is None:
            continue
        if isinstance(sig.experts.rows, Affine) or isinstance(sig.experts.places, Affine):
            yield (
                f"says that its step {step} has {sig.experts.rows} rows for the experts of a device and "
                f"{sig.experts.places} places; a plan has numbers"
            )
    if chunk.experts and any(i.kind == "batch" for i in chunk.inputs):
        yield "has the rows of several devices, and reads the batch, of which each has its own"


def _channel_problem(plan: Plan, channel: Channel) -> str:
    if channel.kind != "group" or len(channel.roles) != 1:
        return f"is for tokens of experts, and joins {', '.join(channel.roles)}; one role is needed"
    if len(channel.over) != 1 or channel.over[0] not in plan.experts:
        along = ", ".join(plan.experts) or "no axis"
        return (
            f"is for tokens of experts, and joins ranks along {', '.join(channel.over)}; their "
            f"experts differ along {along}"
        )
    return ""


def _use_problems(plan: Plan, role: RolePlan) -> Iterator[tuple[int, str]]:
    """Yield the problems of the exchanges of a role: each must be an all-to-all."""
    for index, instr in enumerate(role.program):
        for part in instr.parts:
            op = part.op
            if (
                isinstance(op, Collective)
                and plan.channel(op.channel).purpose == PURPOSE
                and op.kind != "all_to_all"
            ):
                yield (
                    index,
                    f"it is an {op.law.name} on {op.channel}, where tokens go to experts and back by AllToAll",
                )
