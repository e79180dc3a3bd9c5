"""Graph to Plan: one program order per role, waits, allocations and frees, peaks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal

from piper_compiler.durations import InstructionSeconds
from piper_compiler.passes.complete import Training
from piper_compiler.passes.dependencies import Dependencies, dependencies
from piper_compiler.passes.draft import Name, Place, Releases, RoleDraft, unseen
from piper_compiler.passes.fuse import Task, tasks
from piper_compiler.passes.overlap import interleavings, span_seconds
from piper_compiler.passes.parts import Maker, PartMaker
from piper_compiler.passes.positions import Positions, positions
from piper_compiler.passes.release import releases
from piper_compiler.passes.schedule import node_seconds, schedule
from piper_ir.costs import Costs
from piper_ir.errors import CompileError, PlanError
from piper_ir.graph import Graph
from piper_ir.memory import with_peaks
from piper_ir.ops import COMM, Op
from piper_ir.plan import COMPUTE, Device, Instr, Plan, RolePlan, State, Values
from piper_ir.program import Chunk
from piper_ir.sizes import ITEM_BYTES, bind
from piper_ir.timing import Prepared, Times, prepare_orders, sweep


@dataclass(frozen=True)
class Options:
    """`fuse`: join neighbours into one instruction. `recv_ahead`: how many compute instructions before its first reader a
    receive is posted. `device`: the kind of device that peaks of memory are for; the program is the same for all."""

    fuse: bool = True
    recv_ahead: int = 2
    device: Device = ""


def lower(graph: Graph, rows: int, training: Training, options: Options, costs: Costs | None = None) -> tuple[Graph, Plan]:
    """The plan of a complete graph at `rows` rows per microbatch and rank, and the graph with the interleaving of its overlaps
    that was chosen."""
    chunks = bound_chunks(graph, rows)
    graph, maker, drafts, timed = _best(graph, chunks, rows, options, costs)
    plan = plan_of(graph, chunks, rows, graph.microbatches, training, options)
    held = states(graph, training)
    roles = []
    for draft, freed in zip(drafts, release_all(drafts, timed), strict=True):
        roles.append(role_plan(graph, draft.role, draft.instructions(freed), held[draft.role], tuple(draft.allocs_first)))
    return graph, with_peaks(replace(plan, roles=tuple(roles), values=Values(maker.kinds)))


Timed = tuple[Prepared, Times]
_Candidate = tuple[Graph, PartMaker, list[RoleDraft[str]], Timed]


def _best(graph: Graph, chunks: dict[str, Chunk], rows: int, options: Options, costs: Costs | None) -> _Candidate:
    """The drafts under the interleaving of overlaps that the timing sweep finishes first."""
    seconds: dict[str, float] = {}
    if graph.overlaps:
        nodes = tuple(graph.nodes[id] for group in graph.overlaps for id in group.nodes)
        seconds = dict(zip([n.id for n in nodes], node_seconds(graph, nodes, chunks, rows, costs), strict=True))
    best: _Candidate | None = None
    for candidate in interleavings(graph, seconds):
        try:
            made = _drafted(candidate, chunks, rows, options, costs)
        except (CompileError, PlanError):
            if best is None:
                raise  # nothing is chosen yet here, so it is the strategy's own contradiction
            continue  # this interleaving would wait for itself
        if best is None or made[-1][1].makespan < best[-1][1].makespan * (1 - 1e-9):
            best = made
    assert best is not None, "there is always the graph as it is"
    return best


def _drafted(graph: Graph, chunks: dict[str, Chunk], rows: int, options: Options, costs: Costs | None) -> _Candidate:
    maker = PartMaker(graph, chunks, rows, graph.microbatches * graph.replicas, InstructionSeconds(chunks.values(), costs))
    drafts = draft_roles(graph, dependencies(graph), chunks, rows, maker, options, costs)
    return graph, maker, drafts, run_of(graph, drafts)


def draft_roles(
    graph: Graph,
    deps: Dependencies,
    chunks: dict[str, Chunk],
    rows: int,
    maker: Maker[Name],
    options: Options,
    costs: Costs | None,
) -> list[RoleDraft[Name]]:
    """Every role's instructions in program order."""
    spans = set(deps.spans.values())
    given = {span[0]: span_seconds(graph.program, chunks, [deps.node(i) for i in span]) for span in spans}
    sequence = schedule(graph, deps, chunks, rows, costs, given)
    work = tasks(graph, deps, sequence, options.fuse)
    where = positions(graph, deps, sequence, work, options.recv_ahead)
    return [_draft(role, deps, work[role], where, maker, given) for role in graph.roles]


def run_of(graph: Graph, drafts: Sequence[RoleDraft[Name]]) -> Timed:
    """A run without frees under canonical durations."""
    prepared = prepare_orders([draft.issue_order() for draft in drafts], graph.channels.values())
    return prepared, sweep(prepared, [s for draft in drafts for s in draft.seconds], latency=graph.program.hop)


def release_all(drafts: Sequence[RoleDraft[Name]], timed: Timed) -> list[Releases[Name]]:
    """What each role frees, which a run without frees decides."""
    prepared, times = timed
    return [releases(draft, offset, times) for draft, offset in zip(drafts, prepared.offsets, strict=False)]


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


def _draft(
    role: str, deps: Dependencies, work: list[Task], where: Positions, maker: Maker[Name], given: Mapping[int, float]
) -> RoleDraft[Name]:
    builder = _RoleBuilder(role, deps, maker, given)
    comm = where[role]
    at = 0
    for k, task in enumerate(work):
        while at < len(comm) and comm[at][1] <= k:
            builder.comm(comm[at][0])
            at += 1
        builder.compute(task)
    assert at == len(comm), "communication after the Update"
    return builder.draft


class _RoleBuilder(Generic[Name]):
    """Appends instructions in program order and derives their waits from the edges of the graph. `given`: first node of each
    span -> the seconds of its instruction. `done`: where the nodes of the role stand; those of other roles are not waited for
    (a receive needs its send, which is a rendezvous)."""

    def __init__(self, role: str, deps: Dependencies, maker: Maker[Name], given: Mapping[int, float]) -> None:
        self.deps, self.given = deps, given
        self.maker: Maker[Name] = maker
        self.draft: RoleDraft[Name] = RoleDraft(role)
        self.count: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        """What the compute stream has waited for."""
        self.seen: dict[str, dict[str, int]] = defaultdict(dict)
        """And the others."""
        self.done: dict[int, Place] = {}

    def compute(self, task: Task) -> None:
        draft, done, comm, before = self.draft, self.done, self.deps.comm, self.deps.before
        waits = [done[j] for i in task for j in before[i] if comm[j] and j in done]
        parts, seconds = self.maker.task(self.deps, task)
        if task[0] in self.given:
            seconds = draft.given[len(draft.streams)] = self.given[task[0]]
        place = COMPUTE, len(draft.compute) + 1
        draft.append(place, "", parts, unseen(waits, self.computed) if waits else (), seconds)
        for i in task:
            done[i] = place

    def comm(self, i: int) -> None:
        draft, done = self.draft, self.done
        node = self.deps.node(i)
        stream = node.stream
        parts, seconds = self.maker.comm(self.deps, i)
        waits = [done[j] for j in self.deps.before[i] if j in done]
        if waits:
            waits = [wait for wait in waits if wait[0] != stream]
        if written := parts[0][4]:  # its buffer is made right after the latest compute instruction
            if draft.compute:
                draft.allocs_after.setdefault(draft.compute[-1], []).extend(written)
                waits.append((COMPUTE, len(draft.compute)))
            else:
                draft.allocs_first.extend(written)
        n = self.count[stream] = self.count.get(stream, 0) + 1
        place = done[i] = stream, n
        draft.append(place, _channel(node.op), parts, unseen(waits, self.seen[stream]) if waits else (), seconds)


def _channel(op: Op) -> str:
    assert isinstance(op, COMM)
    return op.channel


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
        alone = [State(f"{kind}:{ref}", kind, bind(specs[ref].nbytes, 0)) for ref, kind in kinds.items() if ref not in bucketed]
        for role in {graph.nodes[f"{chunk.id}.F@{mb}"].role: None for mb in range(graph.microbatches)}:
            out[role].update({s.id: s for s in alone})
    return {role: tuple(states.values()) for role, states in out.items()}
