"""Faults of schedules: changes of a finished plan with split backwards, several chunks per device and a stage on two
devices, as a wrong pass would have made it. tests/faults/mutants.py tries them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from piper_ir.plan.plan import COMPUTE, Instr, Part, Plan, RolePlan
from piper_ir.program.ops import Compute, Load, Recv, Update
from tests.helpers.plan_edits import (
    bucket_of,
    every_part,
    inserted,
    instructions,
    is_step,
    with_instr,
    with_op,
    with_program,
    without,
)

Change = Callable[[Plan], Plan | None]


def _alone(plan: Plan, step: str) -> Iterator[tuple[RolePlan, int, Instr]]:
    """Instructions that compute one phase of a backward that is split, and nothing else."""
    for role, k, instr in instructions(plan, lambda i: i.stream == COMPUTE):
        if {p.op.step for p in instr.parts if isinstance(p.op, Compute)} == {step}:
            yield role, k, instr


def _first_weight_gradient(plan: Plan) -> tuple[RolePlan, int, Instr] | None:
    return next(_alone(plan, "W"), None)


def weight_before_input_gradient(plan: Plan) -> Plan | None:
    """A W runs before the I of its microbatch."""
    for role, k, instr in _alone(plan, "W"):
        mb = instr.parts[0].mb
        mine = {p.op.chunk for p in instr.parts if isinstance(p.op, Compute)}
        for j, other in enumerate(role.program[:k]):
            if any(
                is_step(p, "I") and p.mb == mb and isinstance(p.op, Compute) and p.op.chunk in mine
                for p in other.parts
            ):
                return with_program(plan, role, inserted(without(role, k), j, instr))
    return None


def _swap_microbatches(
    plan: Plan, port: str, wanted: Callable[[RolePlan, Part], bool]
) -> Plan | None:
    """Values of a port (a prefix) of microbatches 0 and 1 change places in what some parts read."""

    def other(value: str) -> str:
        name, mark, rest = value.partition("@")
        mb, hash, role = rest.partition("#")
        swapped = {"0": "1", "1": "0"}.get(mb, mb)
        found = f"{name}{mark}{swapped}{hash}{role}"
        return found if f":{port}" in value and found in plan.values else value

    return every_part(plan, wanted, lambda p: replace(p, reads=tuple(map(other, p.reads))))


def handed_to_the_other_microbatch(plan: Plan) -> Plan | None:
    """W takes what the I of another microbatch handed over."""
    if _first_weight_gradient(plan) is None:
        return None
    return _swap_microbatches(plan, "iw", lambda r, p: is_step(p, "W"))


def local_hand_off_of_the_other_microbatch(plan: Plan) -> Plan | None:
    """A chunk takes from the chunk before it on the same device what that made of another microbatch."""

    def local(role: RolePlan, part: Part) -> bool:
        made = {v for i in role.program for p in i.parts if is_step(p, "F") for v in p.writes}
        return is_step(part, "F") and any(v in made for v in part.reads)

    return _swap_microbatches(plan, "out", local)


def activation_of_the_other_chunk(plan: Plan) -> Plan | None:
    """Two chunks of one device take each other's activation, of the same microbatch and size."""
    for role in plan.roles:
        received = [
            v
            for i in role.program
            if isinstance(i.parts[0].op, Recv)
            for v in i.parts[0].writes
            if ":out" in v
        ]
        for n, a in enumerate(received):
            for b in received[n + 1 :]:
                if (
                    a.split("@")[1] == b.split("@")[1]
                    and plan.values[a].spec == plan.values[b].spec
                ):
                    return _exchanged(plan, {a: b, b: a})
    return None


def _exchanged(plan: Plan, pair: Mapping[str, str]) -> Plan | None:
    """Forwards read other values in place of some."""
    return every_part(
        plan,
        lambda r, p: is_step(p, "F"),
        lambda p: replace(p, reads=tuple(pair.get(v, v) for v in p.reads)),
    )


def freed_before_the_weight_gradient(plan: Plan) -> Plan | None:
    """What W needs dies with I."""
    for role, k, instr in _alone(plan, "W"):
        last = instr.parts[-1]
        for v in last.frees:
            for j, other in enumerate(role.program[:k]):
                if any(is_step(p, "I") and v in p.reads for p in other.parts):
                    early = (
                        *other.parts[:-1],
                        replace(other.parts[-1], frees=(*other.parts[-1].frees, v)),
                    )
                    late = (
                        *instr.parts[:-1],
                        replace(last, frees=tuple(x for x in last.frees if x != v)),
                    )
                    program = list(role.program)
                    program[j], program[k] = replace(other, parts=early), replace(instr, parts=late)
                    return with_program(plan, role, program)
    return None


def lost_weight_gradient(plan: Plan) -> Plan | None:
    """A W that is an instruction of its own does not run; what it would have freed is freed by the instruction
    before."""
    found = _first_weight_gradient(plan)
    if found is None:
        return None
    role, k, instr = found
    dying = tuple(v for p in instr.parts for v in p.frees)
    at = max(j for j in range(k) if role.program[j].stream == COMPUTE)
    before = role.program[at]
    kept = replace(
        before,
        parts=(
            *before.parts[:-1],
            replace(before.parts[-1], frees=(*before.parts[-1].frees, *dying)),
        ),
    )
    changed = with_instr(plan, role, at, kept)
    return with_program(changed, changed.role(role.role), without(changed.role(role.role), k))


def repeated_weight_gradient(plan: Plan) -> Plan | None:
    """A W that is an instruction of its own runs twice."""
    found = _first_weight_gradient(plan)
    if found is None:
        return None
    role, k, instr = found
    again = replace(
        instr,
        parts=tuple(replace(p, frees=()) for p in instr.parts),
        waits=(),
        frees_before=(),
        allocs_after=(),
    )
    return with_program(plan, role, inserted(list(role.program), k, again))


def gradient_of_the_other_chunk(plan: Plan) -> Plan | None:
    """The W of one chunk adds into the gradients of another of the same shapes."""
    codes: dict[str, str] = {}
    for chunk in plan.chunks:
        twin = codes.setdefault(chunk.code, chunk.id)
        if twin != chunk.id and chunk.code and _first_weight_gradient(plan):
            wrong = Compute(chunk.id, "W")
            return every_part(
                plan,
                lambda r, p, wrong=wrong: p.op == wrong,
                lambda p, twin=twin: with_op(p, chunk=twin),
            )  # type: ignore[misc]  # bound in a loop
    return None


def reduced_after_the_last_input_gradient(plan: Plan) -> Plan | None:
    """A bucket is reduced when the last I is done, and a W adds into it afterwards."""
    for role, k, instr in instructions(plan, lambda i: bool(bucket_of(i))):
        weights = [
            j for j, i in enumerate(role.program[:k]) if i in [x for _, _, x in _alone(plan, "W")]
        ]
        if weights:
            at = weights[-1]
            waits = ((COMPUTE, sum(i.stream == COMPUTE for i in role.program[:at])),)
            return with_program(
                plan, role, inserted(without(role, k), at, replace(instr, waits=waits))
            )
    return None


def stale_second_copy(plan: Plan) -> Plan | None:
    """The second device of a stage that two hold does not update it."""
    shared = [b for b in plan.buckets if len(b.roles) > 1]
    for bucket in shared:
        for role, k, instr in instructions(plan, lambda i: isinstance(i.parts[-1].op, Update)):
            op = instr.parts[-1].op
            if role.role == bucket.roles[-1] and isinstance(op, Update) and len(op.buckets) > 1:
                left = tuple(b for b in op.buckets if b != bucket.id)
                return with_instr(
                    plan,
                    role,
                    k,
                    replace(
                        instr, parts=(*instr.parts[:-1], with_op(instr.parts[-1], buckets=left))
                    ),
                )
    return None


def buffer_read_early(plan: Plan) -> Plan | None:
    """A chunk reads a buffer before another has updated it for the microbatch before."""
    updating = {c.id: o.ref for c in plan.chunks for o in c.outputs if o.kind == "buffer"}
    reading = {
        c.id
        for c in plan.chunks
        for i in c.inputs
        if i.kind == "buffer" and i.ref in updating.values()
    } - set(updating)
    for role in plan.roles:
        for k, j in combinations(range(len(role.program)), 2):
            update, read = role.program[k], role.program[j]
            for part in read.parts:
                loads = [
                    p
                    for p in read.parts
                    if isinstance(p.op, Load) and set(p.writes) <= set(part.reads)
                ]
                loaded = {v for p in loads for v in p.writes}
                mine = (
                    isinstance(part.op, Compute)
                    and part.op.step == "F"
                    and part.op.chunk in reading
                )
                if mine and set(part.reads) <= loaded and _forwards(update) & set(updating):
                    moved = [*loads, part]
                    early = replace(update, parts=(*moved, *update.parts))
                    late = replace(read, parts=tuple(p for p in read.parts if p not in moved))
                    return with_program(
                        plan,
                        role,
                        [
                            *role.program[:k],
                            early,
                            *role.program[k + 1 : j],
                            late,
                            *role.program[j + 1 :],
                        ],
                    )
    return None


def _forwards(instr: Instr) -> set[str]:
    """The chunks whose forward an instruction runs."""
    return {p.op.chunk for p in instr.parts if isinstance(p.op, Compute) and p.op.step == "F"}


SCHEDULE: tuple[Change, ...] = (
    weight_before_input_gradient, handed_to_the_other_microbatch, local_hand_off_of_the_other_microbatch,
    activation_of_the_other_chunk, freed_before_the_weight_gradient, lost_weight_gradient, repeated_weight_gradient,
    gradient_of_the_other_chunk, reduced_after_the_last_input_gradient, stale_second_copy, buffer_read_early,
)  # fmt: skip
