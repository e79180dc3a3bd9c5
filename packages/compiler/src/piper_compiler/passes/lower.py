"""Graph to Plan: one program order per role, waits, allocations and frees, peaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from piper_compiler.durations import InstructionSeconds
from piper_compiler.passes.columns import columns
from piper_compiler.passes.complete import Training
from piper_compiler.passes.dependencies import Dependencies, dependencies
from piper_compiler.passes.draft import Draft, draft
from piper_compiler.passes.fuse import tasks
from piper_compiler.passes.naming import Named
from piper_compiler.passes.overlap import interleavings, span_seconds
from piper_compiler.passes.parts import PartMaker
from piper_compiler.passes.positions import positions
from piper_compiler.passes.release import releases
from piper_compiler.passes.schedule import Scheduler, node_seconds
from piper_ir.costs import Costs
from piper_ir.errors import CompileError, PlanError
from piper_ir.graph import Graph
from piper_ir.memory import with_peaks
from piper_ir.plan import COMPUTE, DeviceType, Instr, Plan, RolePlan, State, Values
from piper_ir.program import Chunk
from piper_ir.sizes import ITEM_BYTES, bind
from piper_ir.timing import Prepared, Times, sweep


@dataclass(frozen=True)
class Options:
    """`fuse`: join neighbours into one instruction. `recv_ahead`: how many compute instructions before its first reader a
    receive is posted. `device`: the kind of device that peaks of memory are for; the program is the same for all."""

    fuse: bool = True
    recv_ahead: int = 2
    device: DeviceType = ""


def lower(graph: Graph, rows: int, training: Training, options: Options, costs: Costs | None = None) -> tuple[Graph, Plan]:
    """The plan of a complete graph at `rows` rows per microbatch and rank, and the graph with the interleaving of its overlaps
    that was chosen."""
    chunks = bound_chunks(graph, rows)
    graph, maker, named, times = _best(graph, chunks, rows, options, costs)
    plan = plan_of(graph, chunks, rows, graph.microbatches, training, options)
    held = states(graph, training)
    freed = releases(named.draft, named.uses, times)
    roles = [
        role_plan(graph, role, program, held[role], first)
        for role, program, first in zip(graph.roles, named.programs(freed), named.allocs_first(), strict=True)
    ]
    return graph, with_peaks(replace(plan, roles=tuple(roles), values=Values(maker.kinds)))


_Candidate = tuple[Graph, PartMaker, Named, Times]


def _best(graph: Graph, chunks: dict[str, Chunk], rows: int, options: Options, costs: Costs | None) -> _Candidate:
    """The drafts under the interleaving of overlaps that the timing sweep finishes first."""
    known = InstructionSeconds(chunks.values(), costs)
    seconds: dict[str, float] = {}
    if graph.overlaps:
        nodes = tuple(graph.nodes[id] for group in graph.overlaps for id in group.nodes)
        seconds = dict(zip([n.id for n in nodes], node_seconds(graph, nodes, chunks, rows, known), strict=True))
    best: _Candidate | None = None
    for candidate in interleavings(graph, seconds):
        try:
            made = _drafted(candidate, chunks, rows, options, known)
        except (CompileError, PlanError):
            if best is None:
                raise  # nothing is chosen yet here, so it is the strategy's own contradiction
            continue  # this interleaving would wait for itself
        if best is None or made[-1].makespan < best[-1].makespan * (1 - 1e-9):
            best = made
    assert best is not None, "there is always the graph as it is"
    return best


def _drafted(graph: Graph, chunks: dict[str, Chunk], rows: int, options: Options, seconds: InstructionSeconds) -> _Candidate:
    maker = PartMaker(graph, chunks, rows, graph.microbatches * graph.replicas, seconds)
    deps = dependencies(graph)
    spans = {span[0]: span_seconds(graph.program, chunks, [deps.node(i) for i in span]) for span in set(deps.spans.values())}
    draft = drafted(graph, deps, chunks, rows, options, seconds, spans)
    named = Named(draft, deps, maker, spans)
    return graph, maker, named, run_of(graph, draft, named.seconds)[1]


def drafted(
    graph: Graph,
    deps: Dependencies,
    chunks: dict[str, Chunk],
    rows: int,
    options: Options,
    seconds: InstructionSeconds,
    spans: Mapping[int, float],
) -> Draft:
    """Every role's instructions in program order. `spans`: first node of each span -> the seconds of its instruction."""
    nodes = columns(graph, deps, Scheduler(graph, deps, chunks, rows, seconds, spans).run())
    work = tasks(graph, deps, nodes, options.fuse)
    return draft(graph, deps, nodes, work, positions(graph, deps, nodes, work.number, options.recv_ahead))


def run_of(graph: Graph, draft: Draft, seconds: Sequence[float]) -> tuple[Prepared, Times]:
    """A run without frees under canonical durations, `seconds` of each instruction."""
    prepared = draft.prepared(draft.waits)
    return prepared, sweep(prepared, seconds, latency=graph.program.hop)


def plan_of(graph: Graph, chunks: dict[str, Chunk], rows: int, microbatches: int, training: Training, options: Options) -> Plan:
    """The plan without its roles and values."""
    program = graph.program
    return Plan(
        program.key,
        graph.mesh,
        rows,
        microbatches,
        graph.replicated,
        (),
        tuple(graph.channels.values()),
        tuple(graph.buckets.values()),
        {},
        tuple(chunks.values()),
        program.params,
        program.buffers,
        tuple(replace(b, spec=b.spec.bind(rows)) for b in program.batch),
        program.loss_kind,
        program.hop,
        options.recv_ahead,
        training.tokens_per_row,
        options.device,
    )


def role_plan(graph: Graph, role: str, program: tuple[Instr, ...], held: tuple[State, ...], first: tuple[str, ...]) -> RolePlan:
    """One role of a plan."""
    streams = tuple(dict.fromkeys([COMPUTE, *[i.stream for i in program]]))
    placed = graph.roles[role]
    return RolePlan(role, placed, graph.mesh.ranks(placed), program, streams, held, first)


def bound_chunks(graph: Graph, rows: int) -> dict[str, Chunk]:
    """Chunks with int sizes and the coordinates that directives added."""
    out = {}
    for chunk in graph.program.bound(rows):
        node = graph.nodes[f"{chunk.id}.F@0"]
        coords = {k: v for k, v in node.coords.items() if k not in ("chunk", "phase", "op", "mb") and isinstance(v, int)}
        out[chunk.id] = replace(chunk, coords=coords)
    return out


def states(graph: Graph, training: Training) -> dict[str, tuple[State, ...]]:
    """Role -> its persistent bytes: parameters in buckets (flat, with their padding), other parameters, gradients, optimizer,
    buffers."""
    out: dict[str, dict[str, State]] = {role: {} for role in graph.roles}
    bucketed = {p for b in graph.buckets.values() for p in b.params}
    for bucket in graph.buckets.values():
        size = bucket.numel * ITEM_BYTES[bucket.dtype]
        mine = [State(f"param:{bucket.id}", "param", size), State(f"grad:{bucket.id}", "grad", size)]
        if optim := training.state_bytes(bucket):
            mine.append(State(f"optim:{bucket.id}", "optim", optim))
        for role in bucket.roles:
            out[role].update({s.id: s for s in mine})
    specs = {p.name: p.spec for p in graph.program.params} | {b.name: b.spec for b in graph.program.buffers}
    for chunk in graph.program.chunks:
        kinds: dict[str, Literal["param", "buffer"]] = {e.ref: e.kind for e in chunk.inputs if e.kind in ("param", "buffer")}
        kinds |= {o.ref: "buffer" for o in chunk.outputs if o.kind == "buffer"}  # replaced without being read
        alone = [State(f"{kind}:{ref}", kind, bind(specs[ref].nbytes, 0)) for ref, kind in kinds.items() if ref not in bucketed]
        for role in {graph.nodes[f"{chunk.id}.F@{mb}"].role: None for mb in range(graph.microbatches)}:
            out[role].update({s.id: s for s in alone})
    return {role: tuple(states.values()) for role, states in out.items()}
