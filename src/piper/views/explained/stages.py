"""Explain which chunks each stage of a pipeline has."""

from __future__ import annotations

from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Compute
from piper_ir.tools import count_text


def stages(plan: Plan) -> str:
    """Return the chunks of each stage and the role that runs it; "" for a plan of one stage."""
    roles: dict[str, str] = {}
    for role in plan.roles:
        for op in (part.op for template in role.table.templates for part in template.parts):
            if isinstance(op, Compute):
                roles.setdefault(op.chunk, role.role)
    of_stage: dict[int, list[str]] = {}
    empty = {c.id for c in plan.chunks if "empty" in c.coords}
    for chunk in plan.chunks:
        if chunk.id in roles and "stage" in chunk.coords:
            of_stage.setdefault(int(chunk.coords["stage"]), []).append(chunk.id)
    if len(of_stage) < 2:
        return ""
    lines = [
        f"  {stage:3d} {roles[ids[0]]:10} "
        + (f"empty: {ids[0]} passes its inputs on" if empty.issuperset(ids) else _listed(ids))
        for stage, ids in sorted(of_stage.items())
    ]
    return "\n".join(["stages, and the chunks of each", *lines])


def _listed(ids: list[str]) -> str:
    if len(ids) <= 4:
        return ", ".join(ids)
    return f"{ids[0]}, {ids[1]} .. {ids[-1]} ({count_text(len(ids), 'chunk')})"
