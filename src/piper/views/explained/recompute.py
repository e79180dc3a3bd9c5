"""Explain the savings and the cost of policies of recomputation in a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import Plan, RolePlan, is_state
from piper_ir.program.ops import KEEP_ALL, Compute
from piper_ir.program.program import Chunk
from piper_ir.tools import count_text, size_text


def recomputation(plan: Plan) -> str:
    """Return per role and policy the bytes that a microbatch keeps, and the FLOPs of recomputation; "" without any."""
    lines: list[str] = []
    for role in plan.roles:
        by_policy: dict[str, dict[str, Chunk]] = {}
        for op in _computed(role):
            if op.keep != KEEP_ALL:
                by_policy.setdefault(op.keep, {})[op.chunk] = plan.chunk(op.variant)
        for keep, variants in by_policy.items():
            lines.append(f"  {role.role:10} {_cost(plan, keep, list(variants.values()))}")
        if by_policy and (waiting := _waiting(role, by_policy)):
            lines.append(
                f"             a split backward keeps {size_text(waiting)} from I to W, which recomputation does "
                f"not change"
            )
    return (
        "\n".join(["recomputation: what one microbatch keeps from F to its backward", *lines])
        if lines
        else ""
    )


def _computed(role: RolePlan) -> Iterable[Compute]:
    return (
        part.op for instr in role.program for part in instr.parts if isinstance(part.op, Compute)
    )


def _cost(plan: Plan, keep: str, variants: Sequence[Chunk]) -> str:
    kept, whole = (
        sum(_saved(c) for c in chunks)
        for chunks in (variants, [plan.chunk(v.id) for v in variants])
    )
    again = sum(v.steps["R"].cost.flops for v in variants)
    rest = sum(v.steps[s].cost.flops for v in variants for s in v.steps if s not in ("R", "B"))
    share = f"{again / rest:.1%}" if rest else "none"
    chunks = count_text(len(variants), "chunk keeps", "chunks keep")
    return (
        f"{keep}: {chunks} {size_text(kept)} and {size_text(_inputs(variants))} of inputs in "
        f"place of {size_text(whole)}; R is {share} of the FLOPs of F, I and W"
    )


def _saved(chunk: Chunk) -> int:
    return sum(
        bind(chunk.ports[p].nbytes, 0) for p in chunk.steps["F"].writes if p.startswith("saved")
    )


def _inputs(variants: Sequence[Chunk]) -> int:
    """Return the bytes of R's inputs beside the tensors that F keeps for it, each value once."""
    bytes_of: dict[str, int] = {}
    for chunk in variants:
        for port in chunk.steps["R"].reads:
            if port.startswith("in") and not is_state(chunk, port):
                entry = chunk.inputs[int(port[2:])]
                bytes_of[entry.ref] = bind(entry.spec.nbytes, 0)
    return sum(bytes_of.values())


def _waiting(role: RolePlan, by_policy: dict[str, dict[str, Chunk]]) -> int:
    """Return the bytes of a microbatch that wait for W if I and W are apart, each value once.

    They are the reads of W: tensors that F saved or R recomputed, inputs, and gradients.
    """
    apart: set[str] = set()
    for instr in role.program:
        steps: dict[str, set[str]] = {}
        for part in instr.parts:
            if isinstance(part.op, Compute):
                steps.setdefault(part.op.chunk, set()).add(part.op.step)
        apart |= {chunk for chunk, found in steps.items() if "I" in found and "W" not in found}
    found: dict[str, int] = {}
    for id, chunk in (
        (id, c)
        for variants in by_policy.values()
        for id, c in variants.items()
        if id in apart and "W" in c.steps
    ):
        for port in (p for p in chunk.steps["W"].reads if not is_state(chunk, p)):
            value = chunk.inputs[int(port[2:])].ref if port.startswith("in") else f"{id}:{port}"
            found[value] = bind(chunk.ports[port].nbytes, 0)
    return sum(found.values())
