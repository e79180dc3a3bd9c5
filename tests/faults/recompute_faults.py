"""Faults of a compiler that recomputes: changes of a finished plan that has R parts. tests/faults/mutants.py tries
them."""

from __future__ import annotations

from dataclasses import replace

from piper_ir.plan.plan import Instr, Part, Plan, RolePlan
from piper_ir.program.ops import KEEP_ALL, Compute
from piper_ir.program.program import Chunk
from tests.faults.plan_faults import Change
from tests.helpers.plan_edits import every_part, first_part, instructions, with_instr, with_op


def _again(part: Part) -> bool:
    return isinstance(part.op, Compute) and part.op.step == "R"


def _split(instr: Instr) -> int:
    """Where an instruction recomputes, -1 when it does not."""
    return next((n for n, part in enumerate(instr.parts) if _again(part)), -1)


def recompute_never(plan: Plan) -> Plan | None:
    """R does not make again what F did not keep."""
    for role, k, instr in instructions(plan, lambda i: _split(i) >= 0 and len(i.parts) > 1):
        n = _split(instr)
        return with_instr(
            plan, role, k, replace(instr, parts=(*instr.parts[:n], *instr.parts[n + 1 :]))
        )
    return None


def recompute_late(plan: Plan) -> Plan | None:
    """R runs behind the step that needs its results."""
    for role, k, instr in instructions(plan, lambda i: -1 < _split(i) < len(i.parts) - 1):
        n = _split(instr)
        parts = (*instr.parts[:n], instr.parts[n + 1], instr.parts[n], *instr.parts[n + 2 :])
        return with_instr(plan, role, k, replace(instr, parts=parts))
    return None


def recompute_twice(plan: Plan) -> Plan | None:
    """R runs twice in a microbatch."""
    for role, k, instr in instructions(plan, lambda i: _split(i) >= 0):
        n = _split(instr)
        return with_instr(
            plan, role, k, replace(instr, parts=(*instr.parts[: n + 1], *instr.parts[n:]))
        )
    return None


def recompute_of_another(plan: Plan) -> Plan | None:
    """R makes the tensors of another microbatch: it reads what that one's forward read."""
    if plan.microbatches < 2:
        return None

    def other(name: str, mb: int) -> str:
        head, mark, tail = name.partition(f"@{mb}")
        return f"{head}@{(mb + 1) % plan.microbatches}{tail}" if mark else name

    def wanted(role: RolePlan, part: Part) -> bool:
        return _again(part) and any(
            other(v, part.mb) != v and other(v, part.mb) in plan.values for v in part.reads
        )

    def change(part: Part) -> Part:
        reads = tuple(
            v if other(v, part.mb) not in plan.values else other(v, part.mb) for v in part.reads
        )
        return replace(part, reads=reads, frees=tuple(v for v in part.frees if v not in part.reads))

    return first_part(plan, wanted, change)


def backward_of_another_policy(plan: Plan) -> Plan | None:
    """A weight gradient runs under the policy that keeps all."""

    def wanted(role: RolePlan, part: Part) -> bool:
        return isinstance(part.op, Compute) and part.op.step == "W" and part.op.keep != KEEP_ALL

    return first_part(plan, wanted, lambda part: with_op(part, keep=KEEP_ALL))


def keep_and_recompute(plan: Plan) -> Plan | None:
    """F keeps what R makes again, too: the memory is not saved, and two parts write a tensor."""
    found: dict[str, tuple[str, ...]] = {}
    for _, _, instr in plan.instructions():
        found.update(
            {
                f"{p.op.chunk}@{p.mb}": p.writes
                for p in instr.parts
                if _again(p) and isinstance(p.op, Compute)
            }
        )

    def wanted(role: RolePlan, part: Part) -> bool:
        return (
            isinstance(part.op, Compute)
            and part.op.step == "F"
            and f"{part.op.chunk}@{part.mb}" in found
        )

    def change(part: Part) -> Part:
        assert isinstance(part.op, Compute)
        return replace(part, writes=(*part.writes, *found[f"{part.op.chunk}@{part.mb}"]))

    def more(chunk: Chunk) -> Chunk:
        if "R" not in chunk.steps:
            return chunk
        forward = replace(
            chunk.steps["F"], writes=(*chunk.steps["F"].writes, *chunk.steps["R"].writes)
        )
        return replace(chunk, steps={**chunk.steps, "F": forward})

    changed = every_part(plan, wanted, change)
    return None if changed is None else replace(changed, variants=tuple(map(more, plan.variants)))


RECOMPUTE: tuple[Change, ...] = (
    recompute_never, recompute_late, recompute_twice, recompute_of_another, backward_of_another_policy, keep_and_recompute,
)  # fmt: skip
