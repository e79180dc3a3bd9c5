"""Faults of a compiler that lets tensors wait on the host: changes of a finished plan. tests/faults/mutants.py tries
them."""

from __future__ import annotations

from dataclasses import replace

from piper_ir.plan.plan import HOST, Instr, Plan
from piper_ir.program.collectives import FROM_HOST, TO_HOST
from piper_ir.program.ops import Compute
from tests.faults.plan_faults import Change
from tests.helpers.plan_edits import first_part, instructions, with_instr


def _back(instr: Instr) -> bool:
    return instr.stream == FROM_HOST


def _instead(plan: Plan, value: str, other: str) -> Plan | None:
    """The first step of a chunk that reads a value reads another one."""
    return first_part(
        plan,
        lambda _, part: value in part.reads and isinstance(part.op, Compute),
        lambda part: replace(part, reads=tuple(other if v == value else v for v in part.reads)),
    )


def original_read_on(plan: Plan) -> Plan | None:
    """A backward reads the original, which was copied to the host."""
    for role, _, instr in instructions(plan, _back):
        (copy,), (back,) = instr.parts[0].reads, instr.parts[0].writes
        original = next(i.parts[0].reads[0] for i in role.program if copy in i.parts[0].writes)
        return _instead(plan, back, original)
    return None


def copy_left_behind(plan: Plan) -> Plan | None:
    """Another copy of the same size is brought back, and this one is not."""
    for role, k, first in instructions(plan, _back):
        (copy,) = first.parts[0].reads
        for other in (i.parts[0].reads[0] for i in role.program[k + 1 :] if _back(i)):
            if plan.values[other].spec == plan.values[copy].spec:
                part = replace(first.parts[0], reads=(other,))
                return with_instr(plan, role, k, replace(first, parts=(part,)))
    return None


def read_on_the_host(plan: Plan) -> Plan | None:
    """A backward reads the copy where it is."""
    for _, _, instr in instructions(plan, _back):
        return _instead(plan, instr.parts[0].writes[0], instr.parts[0].reads[0])
    return None


def copied_by_two(plan: Plan) -> Plan | None:
    """The channels of copies join replicas."""
    over = plan.replicated
    if not any(c.purpose == HOST for c in plan.channels) or plan.mesh.degree(over) < 2:
        return None
    channels = tuple(replace(c, over=over) if c.purpose == HOST else c for c in plan.channels)
    return replace(plan, channels=channels)


def read_before_back(plan: Plan) -> Plan | None:
    """A reader does not wait until its tensor is back."""
    for role, k, instr in instructions(plan, lambda i: not i.comm):
        kept = tuple((s, n) for s, n in instr.waits if s != FROM_HOST)
        if kept != instr.waits:
            return with_instr(plan, role, k, replace(instr, waits=kept))
    return None


def freed_before_copied(plan: Plan) -> Plan | None:
    """The device frees tensors without waiting for their copies to the host."""
    out: Plan | None = None
    for role, k, instr in instructions(plan, lambda i: not i.comm and bool(i.frees_before)):
        waits = tuple((s, n) for s, n in instr.waits if s != TO_HOST)
        if waits != instr.waits:
            whole = out or plan
            out = with_instr(whole, whole.role(role.role), k, replace(instr, waits=waits))
    return out


def copy_without_its_forward(plan: Plan) -> Plan | None:
    """A copy to the host does not wait for the forward that makes the tensor."""
    for role, k, instr in instructions(plan, lambda i: i.stream == TO_HOST and bool(i.waits)):
        return with_instr(plan, role, k, replace(instr, waits=()))
    return None


HOSTS: tuple[Change, ...] = (
    original_read_on, copy_left_behind, read_on_the_host, copied_by_two, read_before_back, freed_before_copied,
    copy_without_its_forward,
)  # fmt: skip
