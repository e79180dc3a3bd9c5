"""Explain which backwards of a plan with Inductor's kernels are one graph, and why others are steps R, I and W."""

from __future__ import annotations

from collections import Counter

from piper.api.compiling.compiling import Compiled
from piper_ir.plan.plan import Plan, RolePlan
from piper_ir.program.ops import HANDS_ON, Compute, Step, Update
from piper_ir.program.program import Chunk
from piper_ir.tools import count_text


def backward_graphs(compiled: Compiled) -> str:
    """Return how many chunks have a backward in one graph, and the reasons of the others; "" for eager kernels."""
    if compiled.kernels == "eager":
        return ""
    plan = compiled.plan
    joined, alone = 0, set(compiled.graph.eager)
    reasons: Counter[str] = Counter()
    for name, steps in _steps_run(plan).items():
        joined += "B" in steps
        if not steps.isdisjoint(("I", "W")):
            chunk = plan.chunk(name)
            reasons[
                "eager: torch runs each operation" if chunk.id in alone else _reason(chunk)
            ] += 1
    return "\n".join(
        [
            f"kernels of Inductor: the backward of {count_text(joined, 'chunk')} is one graph",
            *(
                f"  it is steps for {count_text(n, 'chunk')}: {reason}"
                for reason, n in reasons.items()
            ),
        ]
    )


def launched_as_graphs(plan: Plan) -> str:
    """Return how many instructions a rank launches as one CUDA graph; "" where the host issues all."""
    if not plan.cuda_graph:
        return ""
    captured = ", ".join(
        f"{r.role or 'the rank'} {_before_update(r)} of {len(r.program)}" for r in plan.roles
    )
    return (
        "CUDA graph: a rank captures its instructions before the update, and launches them as one from its third step "
        f"on: {captured}"
    )


def _before_update(role: RolePlan) -> int:
    updates = (
        k for k, i in enumerate(role.program) if any(isinstance(p.op, Update) for p in i.parts)
    )
    return next(updates, len(role.program))


def _steps_run(plan: Plan) -> dict[str, set[Step]]:
    """Return the steps that run, by the name of the chunk's variant."""
    steps: dict[str, set[Step]] = {}
    for role in plan.roles:
        for op in (part.op for template in role.table.templates for part in template.parts):
            if isinstance(op, Compute):
                steps.setdefault(op.variant, set()).add(op.step)
    return steps


def _reason(chunk: Chunk) -> str:
    """Return why a backward of a chunk runs its steps one by one."""
    if chunk.opaque:
        return "autograd runs the module as it is"
    if any(sig.experts is not None for sig in chunk.steps.values()):
        return "devices share dropless experts, whose further rounds belong to I and to W"
    if chunk.keep.endswith(HANDS_ON):
        return "R makes outputs again, which R of the next layer reads"
    return "I and W are nodes of their own (split_backward), or R is (apart)"
