"""Check rules R35 and R36: the axes whose devices share chunks, sharded tensors, and collectives inside of steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import COMPUTE, Bucket, Channel, Plan, RolePlan, inside_channel
from piper_ir.program.collectives import COLLECTIVES, law_of
from piper_ir.program.layout import StepCollective
from piper_ir.program.ops import Compute
from piper_ir.program.program import Chunk, Kernel, OverlappedCollective, Param, Signature
from piper_ir.verify.rules import Findings

Meetings = tuple[tuple[StepCollective, ...], tuple[OverlappedCollective, ...]]
"""The collectives of a step, and the ones that are under way while it computes."""


def check_sharing(findings: Findings) -> None:
    """Check R35 and R36."""
    params = {p.name: p for p in findings.plan.params}
    _check_parts(findings, params)
    _check_inside(findings, params)


def _check_parts(findings: Findings, params: Mapping[str, Param]) -> None:
    """Check R35."""
    plan = findings.plan
    for axis in plan.shared:
        if problem := _axis_problem(plan, axis):
            findings.add("R35-parts", f"devices share chunks along {axis}, {problem}")
    for param in plan.params:
        for problem in _param_problems(plan, param):
            findings.add("R35-parts", f"parameter {param.name} {problem}")
    for bucket in plan.buckets:
        if problem := _bucket_problem(bucket, [params[name] for name in bucket.params]):
            findings.add("R35-parts", f"bucket {bucket.id} {problem}")


def _check_inside(findings: Findings, params: Mapping[str, Param]) -> None:
    """Check R36."""
    plan = findings.plan
    known: dict[tuple[str, str], tuple[str, Meetings]] = {}
    for chunk in (*plan.chunks, *plan.variants):
        for problem in (*_step_problems(plan, chunk, params), *_alike_problems(chunk, known)):
            findings.add("R36-inside", problem)
    for channel in plan.channels:
        if channel.purpose in ("tensor", "terms") and (problem := _channel_problem(plan, channel)):
            findings.add("R36-inside", f"channel {channel.id} {problem}")
    for role in plan.roles if plan.shared else ():
        for problem in _missing(plan, role):
            findings.add("R36-inside", problem, role)


def _axis_problem(plan: Plan, axis: str) -> str:
    if plan.mesh.size(axis) < 2:
        return f"and {plan.mesh} has no such axis"
    if axis in plan.replicated:
        return "and rows are shared out along it too; sharers of a chunk have the same rows"
    placed = next((r.role for r in plan.roles if axis in r.placed), "")
    return f"and role {placed} is placed on it; sharers of a chunk run one role" if placed else ""


def _param_problems(plan: Plan, param: Param) -> Iterator[str]:
    axes = [part.axis for part in param.layout]
    apart = (*plan.shared, *plan.experts)
    for what, named, known in (
        ("is in parts", axes, apart),
        ("has gradients that are terms", list(param.summed), plan.shared),
    ):
        if odd := [a for a in named if a not in known or named.count(a) > 1]:
            yield (
                f"{what} along {', '.join(odd)}; devices share chunks along "
                f"{', '.join(known) or 'no axis'}, each once"
            )
    if both := sorted(set(axes) & set(param.summed)):
        yield (
            f"is in parts along {', '.join(both)}, and gradients of parts are no terms of a sum there"
        )
    shape = param.spec.shape
    for part in param.layout:
        if not 0 <= part.dim < len(shape):
            yield f"is in parts of dimension {part.dim}, and has {len(shape)} dimensions"
        elif part.outer < 1 or bind(shape[part.dim], 0) % part.outer:
            yield (
                f"has {shape[part.dim]} elements in dimension {part.dim}, which are not {part.outer} equal parts"
            )


def _bucket_problem(bucket: Bucket, members: Iterable[Param]) -> str:
    for param in members:
        axes = {part.axis for part in param.layout}
        if axes != set(bucket.parts):
            text = f"has other parts along {', '.join(bucket.parts) or 'no axis'}"
            return f"{text}, and its parameter {param.name} along {', '.join(sorted(axes)) or 'no axis'}"
    sums = {frozenset(p.summed): p.name for p in members}
    if len(sums) > 1:
        one, other = list(sums.values())[:2]
        return (
            f"has {one} and {other}, whose gradients are sums along different axes; one reduction "
            f"cannot be right for both"
        )
    return ""


def _step_problems(plan: Plan, chunk: Chunk, params: Mapping[str, Param]) -> Iterator[str]:
    for step, sig in chunk.steps.items():
        for problem in (
            *filter(None, (_collective_problem(plan, one) for one in sig.collectives)),
            *_overlap_problems(sig),
        ):
            yield f"{step} of chunk {chunk.variant} {problem}"
    written = {port for sig in chunk.steps.values() for port in sig.writes}
    for port, over in chunk.terms:
        if port not in written:
            yield f"chunk {chunk.variant} holds terms of {port}, which none of its steps writes"
        if odd := [a for a in over if a not in plan.shared]:
            along = ", ".join(plan.shared) or "no axis"
            yield (
                f"chunk {chunk.variant} holds terms of {port} along {', '.join(odd)}; devices "
                f"share chunks along {along}"
            )
    if plan.shared and (sig_f := chunk.steps.get("F")) is not None:
        read = [chunk.inputs[int(p[2:])] for p in sig_f.reads if p.startswith("in")]
        parts = {part.axis for i in read if i.kind == "param" for part in params[i.ref].layout}
        met = {a for one in sig_f.collectives for a in plan.mesh.along(one.axis)} | {
            a for _, over in chunk.terms for a in over
        }
        if alone := sorted(parts - met - set(plan.experts)):
            yield (
                f"F of chunk {chunk.variant} reads parts along {', '.join(alone)}, and exchanges nothing along it"
            )


def _collective_problem(plan: Plan, one: StepCollective) -> str:
    if one.kind not in COLLECTIVES:
        return f"asks for the collective {one.kind}; known are {', '.join(COLLECTIVES)}"
    along = plan.mesh.along(one.axis)
    if not along or not set(along) <= {*plan.shared, *plan.experts}:
        return f"has an {one.kind} along {one.axis}; devices share chunks along {', '.join(plan.shared) or 'no axis'}"
    degree = plan.mesh.degree(along)
    if law_of(one.kind).blocks and bind(one.nbytes, 0) % degree:
        return (
            f"has an {one.kind} of {one.nbytes} bytes, which {degree} devices cannot share equally"
        )
    return ""


def _overlap_problems(sig: Signature) -> Iterator[str]:
    """Yield the problems of collectives that are under way while a step computes, one at a time."""
    numbers = [o.number for o in sig.overlaps]
    if numbers != sorted(set(numbers)) or not set(numbers) <= set(range(len(sig.collectives))):
        yield (
            f"computes beside its collectives {', '.join(map(str, numbers))}; each of "
            f"{len(sig.collectives)} is named once, in order"
        )
        return
    for one in sig.overlaps:
        collective = sig.collectives[one.number]
        law = COLLECTIVES.get(collective.kind)
        if law is not None and (collective.further or law.in_place or not one.beside.kernels):
            yield (
                f"computes beside its {collective.kind} {one.number}, which cannot be under way meanwhile"
            )
    left = Counter[Kernel]()
    for kernel in sig.cost.kernels:
        left[replace(kernel, count=1)] += kernel.count
    for kernel in [k for o in sig.overlaps for k in o.beside.kernels]:
        left[replace(kernel, count=1)] -= kernel.count
    if more := next((k.op or k.kind for k, n in left.items() if n < 0), ""):
        yield f"computes beside its collectives more {more} than it has"


def _alike_problems(
    chunk: Chunk, known: dict[tuple[str, str], tuple[str, Meetings]]
) -> Iterator[str]:
    """Compare the collectives of steps with the ones of the first chunk that has the same code."""
    for step, sig in chunk.steps.items() if chunk.code else ():
        meetings = sig.collectives, sig.overlaps
        other, found = known.setdefault((chunk.code, step), (chunk.variant, meetings))
        if found != meetings:
            yield (
                f"{step} of chunk {chunk.variant} exchanges something else than in {other}, which has the same code"
            )


def _channel_problem(plan: Plan, channel: Channel) -> str:
    what = "steps" if channel.purpose == "tensor" else "sums between chunks"
    if (
        channel.kind != "group"
        or len(channel.roles) != 1
        or (channel.purpose == "tensor" and channel.streams != (COMPUTE,))
    ):
        place = f" on {COMPUTE}" if channel.purpose == "tensor" else ""
        return (
            f"is for {what}, and joins {', '.join(channel.roles)} on {', '.join(channel.streams)}; "
            f"one role{place} is needed"
        )
    if not channel.over or not set(channel.over) <= {*plan.shared, *plan.experts}:
        along = ", ".join(plan.shared) or "no axis"
        return f"is for {what}, and joins ranks along {', '.join(channel.over)}; devices share chunks along {along}"
    return ""


def _missing(plan: Plan, role: RolePlan) -> Iterator[str]:
    """Yield the axes along which steps of a role meet without a channel that joins just the ranks there."""
    table = role.table
    templates = [table.templates[k] for k in set(table.used)]
    ops = {part.op for template in templates for part in template.parts}
    variants = {op.variant for op in ops if isinstance(op, Compute)}
    axes = {
        one.axis
        for name in variants
        for sig in plan.chunk(name).steps.values()
        for one in sig.collectives
    }
    for axis in sorted(axes):
        id = inside_channel(axis, role.role)
        channel = next((c for c in plan.channels if c.id == id), None)
        if channel is None:
            yield f"its steps meet along {axis}, and there is no channel {id}"
        elif (channel.purpose, channel.roles, set(channel.over)) != (
            "tensor",
            (role.role,),
            set(plan.mesh.along(axis)),
        ):
            joins = f"{', '.join(channel.roles)} over ({', '.join(channel.over)}) for purpose {channel.purpose}"
            yield f"its steps meet along {axis} on channel {id}, which joins {joins}"
