"""Explain the result of a strategy, and its reasons (`piper explain`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from piper.api.compiling.batch_statistics import statistics_note
from piper.api.compiling.compiling import Compiled, advancing_notice
from piper.api.compiling.evaluating import evaluation_notice
from piper.views.explained.exchanges import exchanges
from piper.views.explained.kernels import backward_graphs, launched_as_graphs
from piper.views.explained.layouts import index_facts, layouts
from piper.views.explained.recompute import recomputation
from piper.views.explained.sharing import sharing
from piper.views.explained.stages import stages
from piper_compiler import tile_loss
from piper_ir.ground.sizes import ITEM_BYTES, bind
from piper_ir.plan.plan import Instr, Plan, RolePlan
from piper_ir.program.ops import Compute
from piper_ir.program.program import Chunk, Step
from piper_ir.tools import count_text, flops_text, size_text
from piper_ir.verify import instr_title
from piper_runtime import LossScale

PURPOSES = {
    "expert": "tokens to experts and back",
    "terms": "sums of what devices that share chunks have made",
    "host": "tensors that wait for their backward in the memory of the host",
}
"""The words for the data of a channel, if its name alone says too little."""
FEW = 0.3
"""The share of backward in W below which there is little to schedule; transformers of linear layers have half."""


def explain(compiled: Compiled) -> str:
    """Return the result of a strategy as text: directives, default order, roles, memory, communication, and capture."""
    sections = [
        _program(compiled),
        _costs(compiled.plan, _tiled(compiled)),
        _directives(compiled),
        stages(compiled.plan),
        _order(compiled),
        _split_backwards(compiled),
        backward_graphs(compiled),
        launched_as_graphs(compiled.plan),
        _tiles(compiled),
        recomputation(compiled.plan),
        sharing(compiled.plan, compiled.graph.replication),
        layouts(compiled),
        exchanges(compiled.plan),
        _overlaps(compiled),
        _roles(compiled.plan),
        _communication(compiled.plan),
        _notes(compiled),
    ]
    return "\n\n".join(s for s in sections if s)


def facts(compiled: Compiled) -> dict[str, Any]:
    """Return facts for programs: the text, the indexes of chunks, and per role its ranks, instructions and peak."""
    plan = compiled.plan
    roles = [
        {
            "role": r.role,
            "ranks": list(r.ranks),
            "instructions": len(r.program),
            "peak_bytes": r.peak_bytes,
            "peak_at": r.peak_at,
        }
        for r in plan.roles
    ]
    return {
        "plan": plan.key, "mesh": dict(plan.mesh.sizes), "microbatches": plan.microbatches, "rows": plan.rows, "roles": roles,
        "directives": [str(a) for a in compiled.graph.log], "indexes": index_facts(compiled), "text": explain(compiled),
    }  # fmt: skip


def _program(compiled: Compiled) -> str:
    program, plan = compiled.program, compiled.plan
    codes = (
        len({c.code for c in program.chunks})
        if program.source == "captured"
        else len(program.chunks)
    )
    parameter_bytes = sum(p.spec.nbytes for p in program.params if isinstance(p.spec.nbytes, int))
    lines = [
        f"program {program.key}: {count_text(len(program.chunks), 'chunk')} ({codes} with code of their own), "
        f"{size_text(parameter_bytes)} of parameters",
        *([compiled.layers.text] if compiled.layers is not None and compiled.layers.text else []),
    ]
    names: tuple[tuple[Step, str], ...] = (
        ("F", "forward"),
        ("I", "input gradient"),
        ("W", "weight gradient"),
    )
    for step, name in names:
        lines.append(
            f"  {name:16} {flops_text(_flops(plan, step)):>12} per microbatch of {count_text(plan.rows, 'row')}"
        )
    return "\n".join(lines)


def _tiled(compiled: Compiled) -> Chunk | None:
    """Return the chunk whose loss is computed in tiles; None if there is none."""
    directives = compiled.strategy.directives if compiled.strategy is not None else ()
    if not any(isinstance(d, tile_loss) and d.tiles > 1 for d in directives):
        return None
    return next(c for c in compiled.plan.chunks if any(o.kind == "loss" for o in c.outputs))


def _tiles(compiled: Compiled) -> str:
    """Return the effect of tiles of the loss; "" without any."""
    chunk = _tiled(compiled)
    if chunk is None:
        return ""
    saved = [p for p in chunk.steps["F"].writes if p.startswith("saved")]
    waiting = size_text(sum(bind(chunk.ports[p].nbytes, 0) for p in saved))
    return (
        f"loss in tiles: F of {chunk.id} makes the logits of one tile at a time, and their gradients; {waiting} wait "
        f"for its backward"
    )


def _costs(plan: Plan, tiled: Chunk | None) -> str:
    """Return the assumptions of the costs, and how much of backward can be scheduled on its own."""
    kernels = [
        k for c in plan.chunks for sig in c.steps.values() for k in sig.cost.kernels if k.lowering
    ]
    assumed = dict.fromkeys(f"{k.kind} {k.lowering}" for k in kernels)
    lines = [f"costs assume the lowerings: {', '.join(assumed)}"] if assumed else []
    inputs, weights = _flops(plan, "I"), _flops(plan, "W")
    if inputs + weights:
        share = weights / (inputs + weights)
        lines.append(f"weight gradient: {share * 100:.0f} % of backward FLOPs")
        if share < FEW:
            lines.append(
                f"warning: under {FEW * 100:.0f} %: splitting backward into I and W gains little"
            )
    if empty := [c.id for c in plan.chunks if c is not tiled and _empty_weight_gradient(c)]:
        lines.append(
            f"warning: W is empty, up to adding what I has computed, in chunks with parameters: "
            f"{', '.join(empty)};\n  an operator that returns the gradients of input and weight together runs in I"
        )
    return "\n".join(lines)


def _flops(plan: Plan, step: Step) -> int:
    """Return the FLOPs of one microbatch, on all stages together."""
    return sum(c.steps[step].cost.flops for c in plan.chunks if step in c.steps)


def _empty_weight_gradient(chunk: Chunk) -> bool:
    """Return whether a chunk with trained parameters computes none of their gradients in W.

    Then W is only one addition per element, into the accumulator.
    """
    if "W" not in chunk.steps:
        return False
    w = chunk.steps["W"]
    added = sum(bind(chunk.inputs[i].spec.numel, 0) for i in w.accumulates)
    return bool(w.accumulates) and w.cost.flops <= added


def _directives(compiled: Compiled) -> str:
    return "\n".join(
        [
            f"strategy on {compiled.plan.mesh}",
            *(f"  {i:3d} {a}" for i, a in enumerate(compiled.graph.log)),
        ]
    )


def _order(compiled: Compiled) -> str:
    ordered = {at for edge in compiled.graph.order_edges for at in edge}
    compute = [n for n in compiled.graph.sequence if n.coords.get("op") == "compute"]
    free = sum((n.id, mb) not in ordered for n in compute for mb in n.each)
    if not free:
        return "order: given by the strategy for all compute"
    return (
        f"order: the default for {free} compute nodes that no order directive mentions: go on with the stage "
        f"and\n  microbatch at hand, else backward before forward, else the lowest microbatch;\n  at most 1 + "
        f"(stages after it) microbatches of a stage in flight (1F1B on a chain)"
    )


def _split_backwards(compiled: Compiled) -> str:
    """Return per role how much of a microbatch a split backward keeps after F, and after I for W."""
    split = {
        n.op.chunk
        for n in compiled.graph.sequence
        if isinstance(n.op, Compute) and n.op.step in ("I", "W")
    }
    if not split:
        return ""
    lines = ["backward split into I and W: bytes kept of one microbatch"]
    for role in compiled.plan.roles:
        named = {
            c.id: c
            for name in dict.fromkeys(_chunks(role))
            if (c := compiled.plan.chunk(name)).id in split
        }
        chunks = list(named.values())
        after_f, after_i = (
            sum(_kept(c, steps) for c in chunks) for steps in (("R", "I", "W"), ("W",))
        )
        if chunks:
            lines.append(
                f"  {role.role:10} after F {size_text(after_f)}, after I {size_text(after_i)}"
            )
    return "\n".join(lines)


def _chunks(role: RolePlan) -> Iterator[str]:
    return (p.op.variant for i in role.program for p in i.parts if isinstance(p.op, Compute))


def _kept(chunk: Chunk, steps: tuple[Step, ...]) -> int:
    """Return the bytes that F saves and I hands over and that these steps still read."""
    read = {
        p
        for s in steps
        if s in chunk.steps
        for p in chunk.steps[s].reads
        if p.startswith(("saved", "iw", "gin", "tan"))
    }
    written = {p for s in steps if s in chunk.steps for p in chunk.steps[s].writes}
    outside = {p for p in read - written if len(steps) == 1 or p.startswith("saved")}
    return sum(bind(chunk.ports[p].nbytes, 0) for p in outside)


def _overlaps(compiled: Compiled) -> str:
    """Return each overlap as the compiler interleaved it: instructions in program order, a letter per member."""
    lines = []
    for group in compiled.graph.overlaps:
        letter = {
            compiled.graph.name(at): "abcdefgh"[k % 8]
            for k, member in enumerate(group.members)
            for at in member
        }
        node = compiled.graph.at(group.nodes[0])
        assert node is not None, "an overlap is among nodes of the graph"
        role = compiled.plan.role(node.role)
        titles = [
            (known[0], instr_title(i))
            for i in role.program
            if (known := [letter[n] for n in _nodes(i) if n in letter])
        ]
        shown = " ".join(f"{k}:{name}" for k, name in titles[:8]) + (
            f" ... {len(titles) - 8} more" if len(titles) > 8 else ""
        )
        lines.append(f"  {role.role:10} {shown}")
    return "\n".join(["overlaps, as interleaved", *lines]) if lines else ""


def _nodes(instr: Instr) -> list[str]:
    """Return the graph nodes of an instruction; I and W are parts of one node if a backward is not split."""
    return [
        n
        for p in instr.parts
        if isinstance(p.op, Compute)
        for n in (p.node, f"{p.op.chunk}.B@{p.mb}")
    ]


def _roles(plan: Plan) -> str:
    lines = ["roles"]
    for role in plan.roles:
        compute = sum(i.stream == "compute" for i in role.program)
        lines.append(
            f"  {role.role:10} ranks {_ranks(role.ranks)}: {compute} compute and {len(role.program) - compute} "
            f"communication instructions on {len(role.streams)} streams; peak {size_text(role.peak_bytes)} at "
            f"instruction {role.peak_at}"
        )
        split = sorted(role.peak_by_category.items(), key=lambda x: -x[1])
        lines.append(
            "             " + ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in split)
        )
        if role.host_peak_bytes:
            streams = {
                c.stream_on(role.role)
                for c in plan.channels
                if c.purpose == "host" and role.role in c.roles
            }
            copies = sum(instr.stream in streams for instr in role.program)
            kept = [f"{copies} copies"] * bool(copies)
            there = {s.category for s in role.states if s.host}
            kept += ["the optimizer's states and masters"] * bool(there - {"param"})
            kept += ["parameters"] * ("param" in there)
            lines.append(
                f"             in the memory of the host at most {size_text(role.host_peak_bytes)}: "
                f"{', '.join(kept)}"
            )
    return "\n".join(lines)


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"{ranks[0]}..{ranks[-1]}" if len(ranks) > 4 else ",".join(map(str, ranks))


def _communication(plan: Plan) -> str:
    lines = []
    for channel in plan.channels:
        arrow = " > ".join(channel.roles) if channel.kind == "p2p" else "+".join(channel.roles)
        over = f" over {', '.join(channel.over)}" if channel.over else ""
        lines.append(
            f"  {channel.id:24} {channel.kind:5} {arrow}{over}: {PURPOSES.get(channel.purpose, channel.purpose)}"
        )
    for bucket in plan.buckets:
        if bucket.channel:
            size = size_text(bucket.numel * ITEM_BYTES[bucket.reduce_dtype])
            shown = ", ".join(bucket.params[:3]) + (", ..." if len(bucket.params) > 3 else "")
            lines.append(f"  {bucket.id:24} {size} reduced over {bucket.channel}: {shown}")
    apart = {(b.accumulate_dtype, b.reduce_dtype) for b in plan.buckets if b.casts}
    lines += [
        f"  gradients are summed in {own}, and reduced in {sent}" for own, sent in sorted(apart)
    ]
    return "\n".join(["communication", *lines]) if lines else "communication: none"


def _notes(compiled: Compiled) -> str:
    said = (
        _random_note(compiled),
        _scale_note(compiled),
        statistics_note(compiled.norms, compiled.plan),
        advancing_notice(compiled),
    )
    texts = filter(None, (*said, *compiled.notes, evaluation_notice(compiled.job)))
    return "\n".join(f"note: {note}" for note in texts)


def _random_note(compiled: Compiled) -> str:
    random = [c.id for c in compiled.program.chunks if c.random]
    if not random:
        return ""
    if compiled.job is None or compiled.job.draws == "rows":
        return (
            f"{random[0]} draws random numbers (dropout): those of one device for the whole batch, "
            f"as under any strategy"
        )
    rows = compiled.plan.rows
    return (
        f"{random[0]} draws random numbers (dropout) by torch's own generator; strategies with {rows} rows per "
        f"microbatch draw equal masks, others do not"
    )


def _scale_note(compiled: Compiled) -> str:
    scaling = compiled.job.precision.scaling if compiled.job is not None else None
    if scaling is None:
        return ""
    changes = (
        "which stays"
        if scaling == LossScale.fixed(scaling.initial)
        else f"times {scaling.growth:g} after {scaling.interval:,} steps without an overflow, "
        f"times {scaling.backoff:g} after one"
    )
    return (
        f"the loss is scaled by {scaling.initial:g}, {changes}; each update divides by it, and a step whose gradients "
        f"overflow on any rank is skipped on all"
    )
