"""How a finished plan is changed in tests: parts, instructions and the waits that count them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from piper_ir.plan.plan import Instr, Part, Plan, RolePlan
from piper_ir.program.ops import COMM, Collective, Compute

Wanted = Callable[[RolePlan, Part], bool]


def with_program(plan: Plan, role: RolePlan, program: Iterable[Instr]) -> Plan:
    changed = replace(role, program=tuple(program))
    return replace(plan, roles=tuple(changed if r.role == role.role else r for r in plan.roles))


def with_instr(plan: Plan, role: RolePlan, index: int, instr: Instr) -> Plan:
    """The plan with another instruction in a place."""
    return with_program(plan, role, [*role.program[:index], instr, *role.program[index + 1 :]])


def with_op(part: Part, **fields: Any) -> Part:
    """The part with other fields of its op."""
    return replace(part, op=replace(part.op, **fields))


def every_part(plan: Plan, wanted: Wanted, change: Callable[[Part], Part]) -> Plan | None:
    """Change every part that is wanted; None when there is none."""
    roles = [
        replace(
            r,
            program=tuple(
                replace(i, parts=tuple(change(p) if wanted(r, p) else p for p in i.parts))
                for i in r.program
            ),
        )
        for r in plan.roles
    ]
    return replace(plan, roles=tuple(roles)) if tuple(roles) != plan.roles else None


def first_part(plan: Plan, wanted: Wanted, change: Callable[[Part], Part]) -> Plan | None:
    """Change the first part that is wanted; None when there is none."""
    for role, k, instr in plan.instructions():
        for n, part in enumerate(instr.parts):
            if wanted(role, part):
                return with_instr(
                    plan,
                    role,
                    k,
                    replace(instr, parts=(*instr.parts[:n], change(part), *instr.parts[n + 1 :])),
                )
    return None


def instructions(
    plan: Plan, wanted: Callable[[Instr], bool]
) -> Iterator[tuple[RolePlan, int, Instr]]:
    return ((role, k, i) for role, k, i in plan.instructions() if wanted(i))


def without(role: RolePlan, index: int) -> list[Instr]:
    """The program without an instruction; waits for it become waits for the one before it."""
    stream = role.program[index].stream
    n = sum(i.stream == stream for i in role.program[: index + 1])

    def fewer(waits: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        return tuple(
            (s, k - 1 if s == stream and k >= n else k)
            for s, k in waits
            if not (s == stream and n == k == 1)
        )

    return [replace(i, waits=fewer(i.waits)) for k, i in enumerate(role.program) if k != index]


def inserted(program: list[Instr], at: int, instr: Instr) -> list[Instr]:
    """The program with another instruction, which pushes waits for later ones of its stream."""
    n = sum(i.stream == instr.stream for i in program[:at]) + 1

    def more(waits: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        return tuple((s, k + 1 if s == instr.stream and k >= n else k) for s, k in waits)

    return [*program[:at], instr, *(replace(i, waits=more(i.waits)) for i in program[at:])]


def bucket_of(instr: Instr) -> str:
    """The bucket that an instruction reduces, "" for every other instruction."""
    op = instr.parts[0].op
    return op.bucket if isinstance(op, Collective) else ""


def channel_of(instr: Instr) -> str:
    """The channel of a communication, "" for every other instruction."""
    op = instr.parts[0].op
    return op.channel if isinstance(op, COMM) else ""


def reduction(role: RolePlan, bucket: str) -> int:
    """The index of the instruction that reduces a bucket."""
    return next(k for k, instr in enumerate(role.program) if bucket_of(instr) == bucket)


def is_step(part: Part, step: str) -> bool:
    return isinstance(part.op, Compute) and part.op.step == step
