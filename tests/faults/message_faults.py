"""Faults of a compiler in messages on buckets: in casts of gradients, without overlap, on a mesh of another order.

Changes of a finished plan, as a wrong pass would have made it. tests/faults/mutants.py tries them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

from piper_ir.ground.mesh import Mesh
from piper_ir.plan.plan import COMPUTE, Instr, Part, Plan, RolePlan
from piper_ir.program.ops import Cast, Collective, Compute
from tests.faults.job_faults import JobFault, Judged
from tests.faults.plan_faults import Change
from tests.helpers import compositions
from tests.helpers.compositions import Composition
from tests.helpers.plan_edits import first_part, instructions, with_instr, with_op, with_program


def _casts(instr: Instr) -> bool:
    return any(isinstance(p.op, Cast) for p in instr.parts)


def cast_before_the_last_gradient(plan: Plan) -> Plan | None:
    """Gradients are cast for their reduction before the last of them is added."""
    for role, k, instr in instructions(plan, _casts):
        if instr.parts[0].reads or len(instr.parts) > 1 or instr.frees_before:
            continue
        before = max((j for j in range(k) if role.program[j].stream == COMPUTE), default=-1)
        if before >= 0 and any(isinstance(p.op, Compute) for p in role.program[before].parts):
            program = list(role.program)
            program[before], program[k] = instr, program[before]
            return with_program(plan, role, program)
    return None


def cast_of_another_bucket(plan: Plan) -> Plan | None:
    """The gradients of another bucket are cast."""

    def other(part: Part) -> str:
        own = plan.bucket(part.op.bucket) if isinstance(part.op, Cast) else None
        alike = [b.id for b in plan.buckets if own and b.roles == own.roles and b.id != own.id]
        return next((id for id in alike if own and plan.bucket(id).numel == own.numel), "")

    return first_part(
        plan,
        lambda role, p: isinstance(p.op, Cast) and bool(other(p)),
        lambda p: with_op(p, bucket=other(p)),
    )


def buffer_reduced_without_its_cast(plan: Plan) -> Plan | None:
    """A buffer is reduced in the dtype of its sums."""
    for role, _, instr in instructions(plan, _casts):
        cast = next(p for p in instr.parts if isinstance(p.op, Cast))
        for k, reduction in enumerate(role.program if cast.reads else ()):
            part = reduction.parts[0]
            if isinstance(part.op, Collective) and part.reads == cast.writes:
                parts = (replace(part, reads=cast.reads),)
                return with_instr(plan, role, k, replace(reduction, parts=parts))
    return None


CASTS: tuple[Change, ...] = (
    cast_before_the_last_gradient, cast_of_another_bucket, buffer_reduced_without_its_cast,
)  # fmt: skip


def _lone(plan: Plan, kind: str) -> Iterator[tuple[RolePlan, int, int]]:
    """The collectives of a kind that nothing computes beside, each with the compute right behind it."""
    for role, k, instr in instructions(plan, lambda i: i.comm):
        op = instr.parts[0].op
        behind = next((j for j in range(k, len(role.program)) if not role.program[j].comm), -1)
        computed = sum(i.stream == COMPUTE for i in role.program[:k])
        done = sum(i.stream == instr.stream for i in role.program[: k + 1])
        if isinstance(op, Collective) and op.kind == kind and behind > 0:
            waits = dict(role.program[behind].waits)
            if dict(instr.waits).get(COMPUTE) == computed and waits.get(instr.stream) == done:
                yield role, k, behind


def _goes_on(plan: Plan, kind: str) -> Plan | None:
    for role, k, behind in _lone(plan, kind):
        instr, stream = role.program[behind], role.program[k].stream
        waits = tuple(w for w in instr.waits if w[0] != stream)
        return with_instr(plan, role, behind, replace(instr, waits=waits))
    return None


def computes_beside_a_lone_gather(plan: Plan) -> Plan | None:
    """Without overlap, a device computes while the parameters that it reads are gathered."""
    return _goes_on(plan, "all_gather")


def computes_beside_a_lone_scatter(plan: Plan) -> Plan | None:
    """Without overlap, a device adds up gradients while they are scattered."""
    return _goes_on(plan, "reduce_scatter")


def lone_scatter_beside_the_last_backward(plan: Plan) -> Plan | None:
    """Without overlap, gradients are scattered beside the backward that adds the last of them."""
    for role, k, _ in _lone(plan, "reduce_scatter"):
        instr = role.program[k]
        waits = tuple((s, n - (s == COMPUTE)) for s, n in instr.waits)
        return with_instr(plan, role, k, replace(instr, waits=waits))
    return None


ALONE: tuple[Change, ...] = (
    computes_beside_a_lone_gather, computes_beside_a_lone_scatter, lone_scatter_beside_the_last_backward,
)  # fmt: skip


def _usual(plan: Plan) -> Mesh | None:
    """The mesh of a plan with its axes in their usual order; None if they are in it."""
    return Mesh(plan.mesh.sizes) if plan.mesh.order else None


def ranks_counted_in_the_usual_order(plan: Plan) -> Plan | None:
    """The plan forgets the order of the mesh's axes."""
    mesh = _usual(plan)
    return None if mesh is None else replace(plan, mesh=mesh)


def stages_on_ranks_of_the_usual_order(plan: Plan) -> Plan | None:
    """Stages are on the ranks that they would have on a mesh of the usual order."""
    mesh = _usual(plan)
    if mesh is None:
        return None
    roles = [replace(role, ranks=tuple(mesh.ranks(role.placed))) for role in plan.roles]
    changed = replace(plan, roles=tuple(roles))
    return changed if changed != plan else None


MESHES: tuple[Change, ...] = (
    ranks_counted_in_the_usual_order, stages_on_ranks_of_the_usual_order,
)  # fmt: skip


def rows_in_the_usual_order(c: Composition) -> Judged | None:
    """Ranks take the rows that they would have on a mesh of the usual order."""

    def replica_of(plan: Plan, rank: int) -> int:
        return (_usual(plan) or plan.mesh).index_along(plan.replicated, rank)

    if not c.axes:
        return None
    with patch.object(Plan, "replica_of", replica_of):
        return compositions.run(c), compositions.expected(c)


ROWS: tuple[JobFault, ...] = (rows_in_the_usual_order,)
