"""Faults of a compiler: changes of a finished plan, as a wrong pass would have made it. tests/mutants.py tries them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

from piper_ir.ops import Add, AllReduce, Compute, Load, Recv, Seed, Send, SquaredNorm, Update
from piper_ir.plan import COMPUTE, Instr, Part, Plan, RolePlan

Change = Callable[[Plan], Plan | None]
"""The faulty plan; None where the plan offers no place for the fault."""


# --- how plans are changed


def _with(plan: Plan, role: RolePlan, program: Iterable[Instr]) -> Plan:
    changed = replace(role, program=tuple(program))
    return replace(plan, roles=tuple(changed if r.role == role.role else r for r in plan.roles))


def _every(plan: Plan, change: Callable[[RolePlan, Part], Part | None]) -> Plan | None:
    """Change every part for which `change` returns another; None when there is none."""
    hit = False

    def changed(role: RolePlan, part: Part) -> Part:
        nonlocal hit
        new = change(role, part)
        hit = hit or new is not None
        return new or part

    roles = [
        replace(r, program=tuple(replace(i, parts=tuple(changed(r, p) for p in i.parts)) for i in r.program)) for r in plan.roles
    ]
    return replace(plan, roles=tuple(roles)) if hit else None


def _first(plan: Plan, change: Callable[[RolePlan, Part], Part | None]) -> Plan | None:
    """Change the first part for which `change` returns another."""
    done = False

    def once(role: RolePlan, part: Part) -> Part | None:
        nonlocal done
        new = None if done else change(role, part)
        done = done or new is not None
        return new

    return _every(plan, once)


def _instructions(plan: Plan, wanted: Callable[[Instr], bool]) -> Iterator[tuple[RolePlan, int, Instr]]:
    return ((role, k, i) for role, k, i in plan.instructions() if wanted(i))


def _without(role: RolePlan, index: int) -> list[Instr]:
    """The program without an instruction; waits for it become waits for the one before it."""
    stream = role.program[index].stream
    n = sum(i.stream == stream for i in role.program[: index + 1])

    def fewer(waits: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        return tuple((s, k - 1 if s == stream and k >= n else k) for s, k in waits if not (s == stream and n == k == 1))

    return [replace(i, waits=fewer(i.waits)) for k, i in enumerate(role.program) if k != index]


def _inserted(program: list[Instr], at: int, instr: Instr) -> list[Instr]:
    """The program with another instruction, which pushes waits for later ones of its stream."""
    n = sum(i.stream == instr.stream for i in program[:at]) + 1

    def more(waits: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        return tuple((s, k + 1 if s == instr.stream and k >= n else k) for s, k in waits)

    return [*program[:at], instr, *(replace(i, waits=more(i.waits)) for i in program[at:])]


def _reduces(instr: Instr) -> bool:
    op = instr.parts[0].op
    return isinstance(op, AllReduce) and bool(op.bucket)


# --- faults of a compiler: waits


def no_receive_wait(plan: Plan) -> Plan | None:
    """The first compute instruction that waits for a receive does not."""
    for role, k, instr in _instructions(plan, lambda i: i.stream == COMPUTE and bool(i.waits)):
        receives = {i.stream for i in role.program if isinstance(i.parts[0].op, Recv)}
        waits = tuple(w for w in instr.waits if w[0] not in receives)
        if waits != instr.waits:
            return _with(plan, role, [*role.program[:k], replace(instr, waits=waits), *role.program[k + 1 :]])
    return None


def no_send_wait(plan: Plan) -> Plan | None:
    """Sends do not wait for what they send."""
    roles = [
        replace(r, program=tuple(replace(i, waits=()) if isinstance(i.parts[0].op, Send) else i for i in r.program))
        for r in plan.roles
    ]
    return replace(plan, roles=tuple(roles)) if tuple(roles) != plan.roles else None


def no_reduction_wait(plan: Plan) -> Plan | None:
    """Update and the gradient norm do not wait for reductions."""
    out, hit = plan, False
    for role in plan.roles:
        streams = {i.stream for i in role.program if _reduces(i)}
        program = [
            replace(i, waits=tuple(w for w in i.waits if w[0] not in streams)) if i.stream == COMPUTE else i for i in role.program
        ]
        hit = hit or tuple(program) != role.program
        out = _with(out, role, program)
    return out if hit else None


def reduce_early(plan: Plan) -> Plan | None:
    """A bucket's reduction starts before the last microbatch, on every member."""
    buckets = [b for b in plan.buckets if b.channel]
    if not buckets or plan.microbatches < 2:
        return None
    out = plan
    for role in [r for r in plan.roles if r.role in buckets[0].roles]:
        k = next(k for k, i in enumerate(role.program) if _reduces(i) and i.parts[0].op.bucket == buckets[0].id)  # type: ignore[union-attr]
        last = [k for k, i in enumerate(role.program) if any(p.mb == plan.microbatches - 1 and _is(p, "W") for p in i.parts)]
        waits = ((COMPUTE, sum(i.stream == COMPUTE for i in role.program[: last[0]])),)
        out = _with(out, role, _inserted(_without(role, k), last[0], replace(role.program[k], waits=waits)))
    return out


def _is(part: Part, step: str) -> bool:
    return isinstance(part.op, Compute) and part.op.step == step


# --- memory


def free_early(plan: Plan) -> Plan | None:
    """A saved tensor dies with the forward that writes it."""

    def early(role: RolePlan, part: Part) -> Part | None:
        saved = [v for v in part.writes if ":saved" in v]
        return replace(part, frees=(*part.frees, saved[0])) if saved and _is(part, "F") else None

    return _first(plan, early)


def free_never(plan: Plan) -> Plan | None:
    """A value is not freed."""
    return _first(plan, lambda role, part: replace(part, frees=part.frees[1:]) if part.frees and _is(part, "W") else None)


def free_twice(plan: Plan) -> Plan | None:
    """A value is freed by its last reader and again by Update."""
    victim = next(p.frees[0] for _, _, i in plan.instructions() for p in i.parts if p.frees)
    home = next(r.role for r, _, i in plan.instructions() for p in i.parts if victim in p.frees)
    return _first(
        plan,
        lambda role, part: (
            replace(part, frees=(*part.frees, victim)) if isinstance(part.op, Update) and role.role == home else None
        ),
    )


def free_while_sent(plan: Plan) -> Plan | None:
    """What is being sent is freed by its writer."""
    sent = {v for _, _, i in plan.instructions() if isinstance(i.parts[0].op, Send) for v in i.parts[0].reads}
    out = _first(
        plan,
        lambda role, p: (
            replace(p, frees=(*p.frees, *(v for v in p.writes if v in sent))) if sent & {*p.writes} and _is(p, "F") else None
        ),
    )
    if out is None:
        return None
    gone = {v for _, _, i in out.instructions() for p in i.parts for v in p.frees if v in p.writes}
    roles = [
        replace(r, program=tuple(replace(i, frees_before=tuple(v for v in i.frees_before if v not in gone)) for i in r.program))
        for r in out.roles
    ]
    return replace(out, roles=tuple(roles))


def no_buffer(plan: Plan) -> Plan | None:
    """A receive has no buffer."""
    for role, k, instr in _instructions(plan, lambda i: bool(i.allocs_after)):
        return _with(plan, role, [*role.program[:k], replace(instr, allocs_after=instr.allocs_after[1:]), *role.program[k + 1 :]])
    return None


# --- values


def _swap_values(plan: Plan, a: str, b: str, wanted: Callable[[Part], bool]) -> Plan | None:
    pair = {a: b, b: a}
    return _every(
        plan,
        lambda role, p: (
            replace(p, reads=tuple(pair.get(v, v) for v in p.reads)) if wanted(p) and pair.keys() & {*p.reads} else None
        ),
    )


def wrong_skip_tensor(plan: Plan) -> Plan | None:
    """Two values of equal shape that one role sends change places."""
    for role in plan.roles:
        sent = [i.parts[0].reads[0] for i in role.program if isinstance(i.parts[0].op, Send) and i.parts[0].mb == 0]
        for a, b in pairwise(sent):
            if plan.values[a].spec == plan.values[b].spec and plan.values[a].category == plan.values[b].category:
                return _swap_values(plan, a, b, lambda p: isinstance(p.op, Send))
    return None


def stale_saved_tensor(plan: Plan) -> Plan | None:
    """Backwards of microbatches 0 and 1 read each other's saved tensors."""
    saved = [v for v in plan.values if ":saved" in v and v.endswith("@0") and f"{v[:-1]}1" in plan.values]
    return _swap_values(plan, saved[0], f"{saved[0][:-1]}1", lambda p: _is(p, "W") or _is(p, "I")) if saved else None


def swap_inputs(plan: Plan) -> Plan | None:
    """Microbatches 0 and 1 load each other's inputs, not their targets."""

    def swap(role: RolePlan, part: Part) -> Part | None:
        inputs = isinstance(part.op, Load) and part.op.tensor.startswith("inputs")
        return replace(part, mb=1 - part.mb) if inputs and part.mb in (0, 1) else None

    return _every(plan, swap) if plan.microbatches > 1 else None


def same_rows(plan: Plan) -> Plan | None:
    """Every microbatch loads the rows of the first."""
    return _every(plan, lambda role, p: replace(p, mb=0) if isinstance(p.op, Load) and p.mb else None)


def crossed_channel(plan: Plan) -> Plan | None:
    """The receiver expects two messages in the other order."""
    for role in plan.roles:
        found = [k for k, i in enumerate(role.program) if isinstance(i.parts[0].op, Recv)]
        for a, b in pairwise(found):
            x, y = role.program[a], role.program[b]
            if x.parts[0].op == y.parts[0].op:
                program = list(role.program)
                program[a], program[b] = replace(x, parts=y.parts), replace(y, parts=x.parts)
                return _with(plan, role, program)
    return None


def lose_operand(plan: Plan) -> Plan | None:
    """A sum of gradients leaves out an operand."""
    return _every(plan, lambda role, p: replace(p, reads=p.reads[:-1]) if isinstance(p.op, Add) and p.mb >= 0 else None)


def double_operand(plan: Plan) -> Plan | None:
    """A sum of gradients takes one operand twice."""
    return _every(
        plan, lambda role, p: replace(p, reads=(p.reads[0],) * len(p.reads)) if isinstance(p.op, Add) and p.mb >= 0 else None
    )


# --- compute


def _without_part(plan: Plan, wanted: Callable[[Part], bool]) -> Plan | None:
    for role, k, instr in _instructions(plan, lambda i: len(i.parts) > 1 and any(wanted(p) for p in i.parts)):
        gone = next(p for p in instr.parts if wanted(p))
        kept = [p for p in instr.parts if p is not gone]
        kept[-1] = replace(kept[-1], frees=(*kept[-1].frees, *gone.frees))
        return _with(plan, role, [*role.program[:k], replace(instr, parts=tuple(kept)), *role.program[k + 1 :]])
    return None


def skip_weight_gradient(plan: Plan) -> Plan | None:
    """The W of one microbatch does not run."""
    return _without_part(plan, lambda p: _is(p, "W") and p.mb == plan.microbatches - 1)


def repeat_weight_gradient(plan: Plan) -> Plan | None:
    """The W of one microbatch runs twice."""
    for role, k, instr in _instructions(plan, lambda i: any(_is(p, "W") for p in i.parts)):
        at = next(n for n, p in enumerate(instr.parts) if _is(p, "W"))
        parts = (*instr.parts[:at], replace(instr.parts[at], frees=()), *instr.parts[at:])
        return _with(plan, role, [*role.program[:k], replace(instr, parts=parts), *role.program[k + 1 :]])
    return None


def seed_without_scale(plan: Plan) -> Plan | None:
    """The loss of a microbatch counts in full."""
    return _every(
        plan, lambda role, p: replace(p, op=replace(p.op, value=1.0)) if isinstance(p.op, Seed) and p.op.value != 1 else None
    )


def seed_without_replicas(plan: Plan) -> Plan | None:
    """The mean is over the microbatches of one replica."""
    if plan.replicas == 1 or plan.loss_kind == "sum":
        return None
    return _every(
        plan, lambda role, p: replace(p, op=replace(p.op, value=p.op.value * plan.replicas)) if isinstance(p.op, Seed) else None
    )


def buffer_order(plan: Plan) -> Plan | None:
    """Two microbatches update a buffer in the other order."""
    if not any(o.kind == "buffer" for c in plan.chunks for o in c.outputs):
        return None
    for role in plan.roles:
        for k, (a, b) in enumerate(pairwise(role.program)):
            if all(i.stream == COMPUTE and not i.allocs_after and any(_is(p, "F") for p in i.parts) for i in (a, b)):
                return _with(plan, role, [*role.program[:k], b, a, *role.program[k + 2 :]])
    return None


# --- reductions and updates


def drop_reduction(plan: Plan) -> Plan | None:
    """A bucket is not reduced, on any member."""
    buckets = [b for b in plan.buckets if b.channel]
    return _reductions(plan, buckets[0].id, lambda role, k: _without(role, k)) if buckets else None


def double_reduction(plan: Plan) -> Plan | None:
    """A bucket is reduced twice, on all members."""
    buckets = [b for b in plan.buckets if b.channel]
    return (
        _reductions(
            plan, buckets[-1].id, lambda role, k: _inserted(list(role.program), k + 1, replace(role.program[k], waits=()))
        )
        if buckets
        else None
    )


def _reductions(plan: Plan, bucket: str, change: Callable[[RolePlan, int], list[Instr]], most: int = 99) -> Plan:
    out = plan
    for role in [r for r in plan.roles if r.role in plan.bucket(bucket).roles][:most]:
        k = next(k for k, i in enumerate(role.program) if _reduces(i) and i.parts[0].op.bucket == bucket)  # type: ignore[union-attr]
        out = _with(out, role, change(role, k))
    return out


def lonely_reduction(plan: Plan) -> Plan | None:
    """One role of several does not take part in the reduction of a tied parameter."""
    tied = [b for b in plan.buckets if len(b.roles) > 1]
    return _reductions(plan, tied[0].id, lambda role, k: _without(role, k), most=1) if tied else None


def reduce_over_roles_only(plan: Plan) -> Plan | None:
    """The reduction of a tied parameter leaves out the replicas."""
    wrong = {c.id for c in plan.channels if c.purpose == "reduce" and c.over and len(c.roles) > 1}
    return replace(plan, channels=tuple(replace(c, over=()) if c.id in wrong else c for c in plan.channels)) if wrong else None


def reductions_in_other_order(plan: Plan) -> Plan | None:
    """One member of a channel reduces two buckets in the other order."""
    for channel in plan.channels:
        used = [
            k for k, i in enumerate(plan.role(channel.roles[0]).program) if _reduces(i) and i.parts[0].op.channel == channel.id
        ]  # type: ignore[union-attr]
        if len(channel.roles) > 1 and len(used) > 1:
            role, program = plan.role(channel.roles[0]), list(plan.role(channel.roles[0]).program)
            a, b = program[used[0]], program[used[1]]
            program[used[0]], program[used[1]] = replace(a, parts=b.parts, waits=b.waits), replace(b, parts=a.parts)
            return _with(plan, role, program)
    return None


def tied_copies_apart(plan: Plan) -> Plan | None:
    """A tied parameter's bucket has no channel: every holder keeps its own gradient."""
    tied = [b.id for b in plan.buckets if len(b.roles) > 1]
    if not tied:
        return None
    out = _reductions(plan, tied[0], lambda role, k: _without(role, k))
    return replace(out, buckets=tuple(replace(b, channel="") if b.id == tied[0] else b for b in plan.buckets))


def forget_bucket(plan: Plan) -> Plan | None:
    """Update leaves out a bucket."""
    return _first(
        plan,
        lambda role, p: (
            replace(p, op=replace(p.op, buckets=p.op.buckets[1:])) if isinstance(p.op, Update) and len(p.op.buckets) > 1 else None
        ),
    )


def forget_clip(plan: Plan) -> Plan | None:
    """One role does not clip."""
    return _first(
        plan,
        lambda role, p: (
            replace(p, op=replace(p.op, clip=None), reads=p.reads[:-1]) if isinstance(p.op, Update) and p.op.clip else None
        ),
    )


def forget_weight(plan: Plan) -> Plan | None:
    """Update does not divide by the sum of weights."""
    return _every(
        plan,
        lambda role, p: (
            replace(p, op=replace(p.op, weighted=False), reads=p.reads[1:])
            if isinstance(p.op, Update) and p.op.weighted
            else None
        ),
    )


def tied_twice_in_norm(plan: Plan) -> Plan | None:
    """Every holder of a tied parameter adds it to the gradient norm."""
    tied = {b.id: b.roles for b in plan.buckets if len(b.roles) > 1}

    def more(role: RolePlan, part: Part) -> Part | None:
        if not isinstance(part.op, SquaredNorm):
            return None
        extra = tuple(b for b, roles in tied.items() if role.role in roles and b not in part.op.buckets)
        return replace(part, op=replace(part.op, buckets=(*part.op.buckets, *extra))) if extra else None

    return _every(plan, more)


def norm_before_reduction(plan: Plan) -> Plan | None:
    """The gradient norm is taken of sums that are not there yet."""
    for role, k, instr in _instructions(plan, lambda i: isinstance(i.parts[0].op, SquaredNorm)):
        first = next((n for n, i in enumerate(role.program) if _reduces(i)), k)
        if first < k:
            return _with(plan, role, _inserted(_without(role, k), first, replace(instr, waits=())))
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
    first = replace(plan.buckets[0], group=next(g for g in sorted(groups) if g != plan.buckets[0].group))
    return replace(plan, buckets=(first, *plan.buckets[1:]))


# --- placement


def wrong_rank_order(plan: Plan) -> Plan | None:
    """Two roles stand on each other's ranks."""
    if len(plan.roles) < 2:
        return None
    a, b = plan.roles[0], plan.roles[1]
    return replace(plan, roles=(replace(a, ranks=b.ranks), replace(b, ranks=a.ranks), *plan.roles[2:]))


def lost_parameter(plan: Plan) -> Plan | None:
    """A role does not hold a parameter that it reads."""
    for role in plan.roles:
        for state in role.states:
            if state.id.startswith("param:") and state.id.removeprefix("param:") in {b.id for b in plan.buckets}:
                states = tuple(s for s in role.states if s.id != state.id)
                return replace(plan, roles=tuple(replace(r, states=states) if r is role else r for r in plan.roles))
    return None


COMPILER: tuple[Change, ...] = (
    no_receive_wait, no_send_wait, no_reduction_wait, reduce_early, free_early, free_never, free_twice, free_while_sent,
    no_buffer, wrong_skip_tensor, stale_saved_tensor, swap_inputs, same_rows, crossed_channel, lose_operand, double_operand,
    skip_weight_gradient, repeat_weight_gradient, seed_without_scale, seed_without_replicas, buffer_order, drop_reduction,
    double_reduction, lonely_reduction, reduce_over_roles_only, reductions_in_other_order, tied_copies_apart, forget_bucket,
    forget_clip, forget_weight, tied_twice_in_norm, norm_before_reduction, overlapping_gradients, wrong_group,
    wrong_rank_order, lost_parameter,
)  # fmt: skip
