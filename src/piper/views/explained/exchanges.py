"""Explain the messages of devices inside of steps, and the work that devices with shared chunks compute whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import Plan, RolePlan
from piper_ir.program.ops import Compute
from piper_ir.tools import size_text
from piper_simulator import axes_inside, repeated_share


def exchanges(plan: Plan) -> str:
    """Return per role the messages inside of the steps of a training step; "" if there are none."""
    met = axes_inside(plan)
    if not met:
        return ""
    axes = ", ".join(f"{axis}={plan.mesh.size(axis)}" for axis in met)
    what = "shared chunks" if plan.shared else "dropless experts"
    lines = [f"{what}: what devices along {axes} exchange inside of steps"]
    lines += [f"  {role.role:10} {text}" for role in plan.roles for text in _messages(plan, role)]
    kept, whole = (
        sum(bind(p.spec.nbytes, plan.rows) for p in params)
        for params in (plan.params, plan.whole_params)
    )
    lines.append(f"  a device keeps {size_text(kept)} of {size_text(whole)} of parameters")
    if plan.shared:
        lines.append(
            f"  {repeated_share(plan):.1%} of the FLOPs repeat what another of these devices computes"
        )
    return "\n".join(lines)


def _messages(plan: Plan, role: RolePlan) -> Iterator[str]:
    """Yield a line per phase: how many messages of each kind, with their bytes on one rank, how many beside compute."""
    sizes_by_step: dict[str, dict[str, list[int]]] = {}
    beside: Counter[tuple[str, str]] = Counter()
    for op in (p.op for instr in role.program for p in instr.parts if isinstance(p.op, Compute)):
        sig = plan.chunk(op.variant).steps[op.step]
        beside.update((op.step, sig.collectives[o.number].kind) for o in sig.overlaps)
        for sent in sig.collectives:
            if nbytes := bind(sent.nbytes, plan.rows):  # further rounds have none in a plan
                sizes_by_step.setdefault(op.step, {}).setdefault(sent.kind, []).append(nbytes)
    for step, kinds in sizes_by_step.items():
        listed = ", ".join(
            f"{len(sizes)} {kind} of {size_text(sum(sizes))}"
            + (f" ({beside[step, kind]} beside compute)" if beside[step, kind] else "")
            for kind, sizes in kinds.items()
        )
        yield f"{step}: {listed}"
    if not sizes_by_step:
        yield "nothing"
