"""`piper explain`: what a strategy became, and why."""

from __future__ import annotations

from typing import Any

from piper.frontdoor import Compiled
from piper_ir.plan import Plan
from piper_ir.program import Chunk, Step
from piper_ir.sizes import ITEM_BYTES, bind

FEW = 0.3
"""A smaller share of backward in W than this leaves little to schedule: in a transformer of linear layers it is about a half."""


def explain(compiled: Compiled) -> str:
    """A text: the directives, the default order if one is used, roles with their memory, communication, and what capture
    found."""
    sections = [
        _program(compiled),
        _costs(compiled.plan),
        _directives(compiled),
        _order(compiled),
        _roles(compiled.plan),
        _communication(compiled.plan),
        _notes(compiled),
    ]
    return "\n\n".join(s for s in sections if s)


def facts(compiled: Compiled) -> dict[str, Any]:
    """What a program asks for: the text, and per role its ranks, instructions and peak."""
    plan = compiled.plan
    roles = [
        {"role": r.role, "ranks": list(r.ranks), "instructions": len(r.program), "peak_bytes": r.peak_bytes, "peak_at": r.peak_at}
        for r in plan.roles
    ]
    return {
        "plan": plan.key, "mesh": dict(plan.mesh.sizes), "microbatches": plan.microbatches, "rows": plan.rows, "roles": roles,
        "directives": [str(a) for a in compiled.graph.log], "text": explain(compiled),
    }  # fmt: skip


def _program(compiled: Compiled) -> str:
    program, plan = compiled.program, compiled.plan
    codes = len({c.code for c in program.chunks}) if program.source == "captured" else len(program.chunks)
    held = sum(p.spec.nbytes for p in program.params if isinstance(p.spec.nbytes, int))
    lines = [
        f"program {program.key}: {len(program.chunks)} chunks ({codes} with code of their own), "
        f"{held / 2**20:.2f} MiB of parameters"
    ]
    names: tuple[tuple[Step, str], ...] = (("F", "forward"), ("I", "input gradient"), ("W", "weight gradient"))
    for step, name in names:
        lines.append(f"  {name:16} {_flops(plan, step) / 1e9:10.3f} GFLOP per microbatch of {plan.rows} rows")
    return "\n".join(lines)


def _costs(plan: Plan) -> str:
    """What the costs assume, and how much of backward can be scheduled on its own."""
    kernels = [k for c in plan.chunks for sig in c.steps.values() for k in sig.cost.kernels if k.lowering]
    assumed = dict.fromkeys(f"{k.kind} {k.lowering}" for k in kernels)
    lines = [f"costs assume the lowerings: {', '.join(assumed)}"] if assumed else []
    inputs, weights = _flops(plan, "I"), _flops(plan, "W")
    if inputs + weights:
        share = weights / (inputs + weights)
        lines.append(f"weight gradient: {share * 100:.0f} % of backward FLOPs")
        if share < FEW:
            lines.append(f"warning: under {FEW * 100:.0f} %: splitting backward into I and W gains little")
    if empty := [c.id for c in plan.chunks if _empty_weight_gradient(c)]:
        lines.append(
            f"warning: W is empty, up to adding what I has computed, in chunks with parameters: {', '.join(empty)};\n"
            "  an operator that returns the gradients of input and weight together runs in I"
        )
    return "\n".join(lines)


def _flops(plan: Plan, step: Step) -> int:
    """Of one microbatch, on all stages together."""
    return sum(c.steps[step].cost.flops for c in plan.chunks if step in c.steps)


def _empty_weight_gradient(chunk: Chunk) -> bool:
    """Whether a chunk with trained parameters computes none of their gradients in W: nothing is left there but one addition per
    element, into the accumulator."""
    if "W" not in chunk.steps:
        return False
    w = chunk.steps["W"]
    added = sum(bind(chunk.inputs[i].spec.numel, 0) for i in w.accumulates)
    return bool(w.accumulates) and w.cost.flops <= added


def _directives(compiled: Compiled) -> str:
    return "\n".join([f"strategy on {compiled.plan.mesh}", *(f"  {i:3d} {a}" for i, a in enumerate(compiled.graph.log))])


def _order(compiled: Compiled) -> str:
    ordered = {i for edge in compiled.graph.order_edges for i in edge}
    free = [n for n in compiled.graph.nodes.values() if n.coords.get("op") == "compute" and n.id not in ordered]
    if not free:
        return "order: given by the strategy for all compute"
    return (
        f"order: the default for {len(free)} compute nodes that no order directive mentions: go on with the stage and\n"
        "  microbatch at hand, else backward before forward, else the lowest microbatch;\n"
        "  at most 1 + (stages after it) microbatches of a stage in flight (1F1B on a chain)"
    )


def _roles(plan: Plan) -> str:
    lines = ["roles"]
    for role in plan.roles:
        compute = sum(i.stream == "compute" for i in role.program)
        lines.append(
            f"  {role.role:10} ranks {_ranks(role.ranks)}: {compute} compute and {len(role.program) - compute} "
            f"communication instructions on {len(role.streams)} streams; "
            f"peak {role.peak_bytes / 2**20:.2f} MiB at instruction {role.peak_at}"
        )
        split = sorted(role.peak_by_category.items(), key=lambda x: -x[1])
        lines.append("             " + ", ".join(f"{name} {size / 2**20:.2f}" for name, size in split) + " MiB")
    return "\n".join(lines)


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"{ranks[0]}..{ranks[-1]}" if len(ranks) > 4 else ",".join(map(str, ranks))


def _communication(plan: Plan) -> str:
    lines = []
    for channel in plan.channels:
        arrow = " > ".join(channel.roles) if channel.kind == "p2p" else "+".join(channel.roles)
        over = f" over {', '.join(channel.over)}" if channel.over else ""
        lines.append(f"  {channel.id:24} {channel.kind:5} {arrow}{over}: {channel.purpose}")
    for bucket in plan.buckets:
        if bucket.channel:
            size = bucket.numel * ITEM_BYTES[bucket.dtype] / 2**20
            shown = ", ".join(bucket.params[:3]) + (", ..." if len(bucket.params) > 3 else "")
            lines.append(f"  {bucket.id:24} {size:.2f} MiB reduced over {bucket.channel}: {shown}")
    return "\n".join(["communication", *lines]) if lines else "communication: none"


def _notes(compiled: Compiled) -> str:
    random = [c.id for c in compiled.program.chunks if c.random]
    if not random:
        return ""
    rows = compiled.plan.rows
    return (
        f"note: {random[0]} draws random numbers (dropout); "
        f"strategies with {rows} rows per microbatch draw equal masks, others do not"
    )
