"""Check rules R21 to R23: the plan is one training step, on parameters that lie as buckets say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import isclose

from piper_ir.ground.expert_tokens import counts_tokens
from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import Bucket, Part, Plan, RolePlan
from piper_ir.program.ops import KEEP_ALL, Compute, Op, Seed, Update
from piper_ir.program.program import Step
from piper_ir.verify.rules import Findings
from piper_ir.verify.values import UsePosition

STEPS: tuple[Step, ...] = ("F", "R", "I", "W", "B")
ALIGNMENT = 256
"""The multiple of bytes at which CUDA's allocator and vectorised kernels assume that a tensor starts."""

_RolePosition = tuple[RolePlan, UsePosition]


def check_steps(findings: Findings) -> None:
    """Check R21, and the parts of R26 on how loss gradients start and updates are weighted."""
    plan = findings.plan
    variants: dict[tuple[str, int], str] = {}
    ran: dict[tuple[str, int, str], list[_RolePosition]] = {}
    for role, place, part in _parts(plan):
        op = part.op
        if isinstance(op, Compute):
            ran.setdefault((op.chunk, part.mb, op.step), []).append((role, place))
            if op.keep != KEEP_ALL:
                variants[op.chunk, part.mb] = op.variant
        elif problem := _scale_problem(plan, op):
            findings.add("R26-scale", problem, role, place[0])
    if plan.chunks and plan.microbatches > len(
        ran
    ):  # said once, since there may be any number of microbatches
        findings.add(
            "R21-steps",
            f"the plan has {plan.microbatches} microbatches, and runs {len(ran)} steps in all",
        )
        return
    _check_buffers(findings, ran)
    _check_runs(findings, variants, ran)


def _scale_problem(plan: Plan, op: Op) -> str:
    """Return the fault of the number from which a loss gradient starts, or of an update's weight; "" if none."""
    if isinstance(op, Seed):
        expected = 1 / (plan.microbatches * plan.replicas) if plan.loss_kind == "mean" else 1.0
        if not isclose(op.value, expected, rel_tol=1e-12):
            return f"the loss gradient starts from {op.value!r}; {expected!r} is expected"
        if op.scaled != _is_scaled(plan):
            return f"scaled is {op.scaled}, but the updates have scaled={not op.scaled}"
    elif isinstance(op, Update) and op.weighted != (plan.loss_kind == "sum") and not plan.evaluates:
        return f"weighted is {op.weighted}, but the loss is a {plan.loss_kind}"
    return ""


def _is_scaled(plan: Plan) -> bool:
    """Return whether the first update divides gradients by the scale of the loss; R26 says that all do alike."""
    updates = (
        part.op
        for role in plan.roles
        for instr in reversed(role.program)
        for part in instr.parts
        if isinstance(part.op, Update)
    )
    return next((op.scaled for op in updates), False)


def _check_runs(
    findings: Findings,
    variants: Mapping[tuple[str, int], str],
    ran: Mapping[tuple[str, int, str], list[_RolePosition]],
) -> None:
    """Check R21 for chunks: each step runs once for each microbatch, after the step before it."""
    plan = findings.plan
    for chunk in plan.chunks:
        for mb in range(plan.microbatches):
            before: _RolePosition | None = None
            steps = plan.chunk(variants.get((chunk.id, mb), chunk.id)).steps
            whole = bool(ran.get((chunk.id, mb, "B")))
            for step in STEPS:
                runs = ran.get((chunk.id, mb, step), [])
                other = whole if step in ("R", "I", "W") else step == "B" and not whole
                times = 0 if other or step not in steps or steps[step].empty else 1
                if len(runs) != times:
                    roles = f" (on {', '.join(role.role for role, _ in runs)})" if runs else ""
                    findings.add(
                        "R21-steps",
                        f"{step} of chunk {chunk.id} runs {len(runs)} times{roles} for microbatch {mb}; {times} "
                        f"expected",
                    )
                elif runs:
                    _check_follows(
                        findings, f"{step} of chunk {chunk.id} for microbatch {mb}", runs[0], before
                    )
                    before = runs[0]


def _check_buffers(
    findings: Findings, ran: dict[tuple[str, int, str], list[_RolePosition]]
) -> None:
    """Check R21 for buffers: forwards use an updated buffer as on one device, by microbatch and on one role."""
    plan = findings.plan
    outputs = [o for c in plan.chunks for o in c.outputs if o.kind == "buffer"]
    for name in dict.fromkeys(o.ref for o in outputs if not counts_tokens(o.ref)):
        updating = {
            c.id
            for c in plan.chunks
            if any(o.kind == "buffer" and o.ref == name for o in c.outputs)
        }
        reading = {
            c.id for c in plan.chunks if any(i.kind == "buffer" and i.ref == name for i in c.inputs)
        }
        users = [c.id for c in plan.chunks if c.id in updating | reading]
        update: _RolePosition | None = None
        reads: list[_RolePosition] = []  # since the update
        for mb, user in product(range(plan.microbatches), users):
            for where in ran.get((user, mb, "F"), []):
                what = (
                    "updates a buffer"
                    if user in updating
                    else f"reads the buffer {name}, which others update"
                )
                follows = [update, *reads] if user in updating else [update]
                for before in follows:
                    _check_follows(
                        findings,
                        f"F of chunk {user}, which {what}, for microbatch {mb}",
                        where,
                        before,
                    )
                if user in updating:
                    update, reads = where, []
                else:
                    reads.append(where)


def _check_follows(
    findings: Findings, what: str, position: _RolePosition, before: _RolePosition | None
) -> None:
    if before is None:
        return
    role, place = position
    if role.role != before[0].role:
        findings.add(
            "R21-steps",
            f"{what}: runs here, the one that it follows on role {before[0].role}",
            role,
            place[0],
        )
    elif place < before[1]:
        findings.add(
            "R21-steps",
            f"{what}: runs before instruction {before[1][0]}, which it must follow",
            role,
            place[0],
        )


def _parts(plan: Plan) -> Iterator[tuple[RolePlan, UsePosition, Part]]:
    for role, index, instr in plan.instructions():
        for p, part in enumerate(instr.parts):
            yield role, (index, p), part


def check_layout(findings: Findings) -> None:
    """Check R22."""
    params = {p.name: p for p in findings.plan.params}
    for bucket in findings.plan.buckets:
        where = f"bucket {bucket.id}"
        item, end, last = bucket.narrowest, 0, "the start"
        if len(bucket.params) != len(bucket.offsets):
            findings.add(
                "R22-buckets",
                f"{where} has {len(bucket.params)} parameters and {len(bucket.offsets)} offsets",
            )
            continue
        for name, offset in zip(bucket.params, bucket.offsets, strict=True):
            if params[name].spec.dtype != bucket.compute_dtype:
                findings.add(
                    "R22-buckets",
                    f"{where} has {name} in {bucket.compute_dtype}; chunks read {params[name].spec.dtype}",
                )
            if offset * item % ALIGNMENT:
                findings.add(
                    "R22-buckets",
                    f"{where}: {name} starts at byte {offset * item}, which is no multiple of {ALIGNMENT}",
                )
            if offset < end:
                findings.add(
                    "R22-buckets",
                    f"{where}: {name} starts at element {offset}, inside of {last}, which ends at {end}",
                )
            end, last = offset + bind(params[name].spec.numel, 0), name
        if end > bucket.numel:
            findings.add(
                "R22-buckets", f"{where} has {bucket.numel} elements; {last} ends at {end}"
            )


def check_holders(findings: Findings) -> None:
    """Check R23."""
    plan = findings.plan
    inside = _check_one_bucket(findings)
    users = _users(plan)
    for param in plan.params:
        own_bucket = inside.get(param.name)
        if param.trained != (own_bucket is not None):
            text = (
                "is trained and in no bucket"
                if own_bucket is None
                else f"is not trained, but in bucket {own_bucket.id}"
            )
            findings.add("R23-holders", f"parameter {param.name} {text}")
        elif own_bucket is not None and users.get(param.name, set()) != set(own_bucket.roles):
            uses, holds = (
                ", ".join(sorted(users.get(param.name, ()))) or "no role",
                ", ".join(sorted(own_bucket.roles)),
            )
            findings.add(
                "R23-holders",
                f"parameter {param.name} is used by {uses}; its bucket {own_bucket.id} is held by {holds}",
            )
    for bucket in plan.buckets:
        problem = _members_problem(plan, bucket)
        if problem:
            findings.add("R23-holders", f"bucket {bucket.id}: {problem}")


def _check_one_bucket(findings: Findings) -> dict[str, Bucket]:
    """Check that no parameter is in two buckets; return the bucket of each parameter that is in one."""
    inside: dict[str, Bucket] = {}
    for bucket in findings.plan.buckets:
        for name in bucket.params:
            if name in inside:
                findings.add(
                    "R23-holders",
                    f"parameter {name} is in the buckets {inside[name].id} and {bucket.id}",
                )
            inside[name] = bucket
    return inside


def _users(plan: Plan) -> dict[str, set[str]]:
    """Return the roles whose chunks read each parameter."""
    users: dict[str, set[str]] = {}
    for role in plan.roles:
        parts = (part for instr in role.program for part in instr.parts)
        for chunk in {part.op.chunk for part in parts if isinstance(part.op, Compute)}:
            for entry in plan.chunk(chunk).inputs:
                if entry.kind == "param":
                    users.setdefault(entry.ref, set()).add(role.role)
    return users


def _members_problem(plan: Plan, bucket: Bucket) -> str:
    """Return the fault, if any, of a bucket's axes and channel, which joins just the ranks that keep the same of it."""
    for name in bucket.roles:
        open_axes = [
            a for a in plan.replicated if plan.mesh.size(a) > 1 and a not in plan.role(name).placed
        ]
        missing = [
            a
            for a in open_axes
            if a not in bucket.over and not (a in plan.experts and a in bucket.parts)
        ]
        if missing:
            return (
                f"role {name} is replicated along {', '.join(missing)}, the bucket along "
                f"{', '.join(bucket.over) or 'nothing'}"
            )
    summed = {a for p in plan.params if p.name in bucket.params for a in p.summed}
    if lost := [a for a in summed if a not in bucket.over]:
        return f"the devices along {', '.join(lost)} make terms of its gradients, and it does not add them"
    alone = [
        a for a in bucket.over if plan.mesh.size(a) > 1 and a not in (*plan.replicated, *summed)
    ]
    if alone:
        along = ", ".join(plan.replicated) or "none"
        return f"it adds gradients along {', '.join(alone)}, and rows are shared out along {along}"
    if mixed := [a for a in bucket.over if a in bucket.parts]:
        return f"it adds gradients along {', '.join(mixed)}, where each rank has another part of its parameters"
    return _reduction_problem(plan, bucket)


def _reduction_problem(plan: Plan, bucket: Bucket) -> str:
    """Return the fault, if any, of the channel that reduces a bucket's gradients."""
    over = tuple(a for a in bucket.over if a not in bucket.shard.optim)
    several = len(bucket.roles) > 1 or any(plan.mesh.size(a) > 1 for a in over)
    if not bucket.channel:
        return "several ranks hold it, and no channel reduces it" if several else ""
    if not several:
        return f"one rank holds it, so channel {bucket.channel} has nothing to reduce"
    channel = plan.channel(bucket.channel)
    if (
        channel.kind != "group"
        or set(channel.roles) != set(bucket.roles)
        or set(channel.over) != set(over)
    ):
        joins = (
            f"the {channel.kind} channel {channel.id} joins {', '.join(channel.roles)} over "
            f"({', '.join(channel.over)})"
        )
        return f"{joins}; {', '.join(bucket.roles)} over ({', '.join(over)}) hold it"
    return ""
