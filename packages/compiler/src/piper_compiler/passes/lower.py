"""Graph to Plan: one program order per role, waits, allocations and frees, peaks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from piper_compiler.durations import InstructionSeconds
from piper_compiler.passes.complete import Training
from piper_compiler.passes.dependencies import Dependencies, dependencies
from piper_compiler.passes.draft import DraftPart, RoleDraft, unseen
from piper_compiler.passes.fuse import Task, tasks
from piper_compiler.passes.parts import PartMaker
from piper_compiler.passes.positions import Positions, positions
from piper_compiler.passes.release import releases
from piper_compiler.passes.schedule import schedule
from piper_ir.costs import Costs
from piper_ir.graph import Graph, Node
from piper_ir.memory import with_peaks
from piper_ir.ops import AllReduce
from piper_ir.plan import COMPUTE, Plan, RolePlan, State, Values
from piper_ir.program import Chunk
from piper_ir.sizes import ITEM_BYTES, bind
from piper_ir.timing import prepare_orders, sweep


@dataclass(frozen=True)
class Options:
    """`fuse`: join neighbours into one instruction. `recv_ahead`: how many compute instructions before its first reader a
    receive is posted."""

    fuse: bool = True
    recv_ahead: int = 2


def lower(graph: Graph, rows: int, training: Training, options: Options, costs: Costs | None = None) -> Plan:
    """The plan of a complete graph at `rows` rows per microbatch and rank."""
    chunks = _bound_chunks(graph, rows)
    deps = dependencies(graph)
    sequence = schedule(graph, deps, chunks, rows, costs)
    work = tasks(graph, deps, sequence, options.fuse)
    where = positions(graph, deps, sequence, work, options.recv_ahead)
    maker = PartMaker(graph, chunks, rows, graph.replicas)
    seconds = InstructionSeconds(chunks.values(), costs)
    drafts = [_draft(graph, role, deps, work[role], where, maker, seconds) for role in graph.roles]
    program = graph.program
    plan = Plan(
        program.key,
        graph.mesh,
        rows,
        graph.microbatches,
        graph.replicated,
        _roles(graph, drafts, _states(graph, training)),
        tuple(graph.channels.values()),
        tuple(graph.buckets.values()),
        Values(maker.kinds),
        tuple(chunks.values()),
        program.params,
        program.buffers,
        tuple(replace(b, spec=b.spec.bind(rows)) for b in program.batch),
        program.loss_kind,
        program.hop,
        options.recv_ahead,
        training.tokens_per_row,
    )
    return with_peaks(plan)


def _bound_chunks(graph: Graph, rows: int) -> dict[str, Chunk]:
    """Chunks with int sizes and the coordinates that directives added."""
    out = {}
    for chunk in graph.program.chunks:
        node = graph.nodes[f"{chunk.id}.F@0"]
        coords = {k: v for k, v in node.coords.items() if k not in ("chunk", "phase", "op", "mb") and isinstance(v, int)}
        out[chunk.id] = replace(chunk.bind(rows), coords=coords)
    return out


def _draft(
    graph: Graph,
    role: str,
    deps: Dependencies,
    work: list[Task],
    where: Positions,
    maker: PartMaker,
    seconds: InstructionSeconds,
) -> RoleDraft:
    builder = _RoleBuilder(role, graph, deps, maker, seconds)
    pending = iter([*where.comm[role], (-1, 1 << 60)])
    node, at = next(pending)
    for k, task in enumerate(work):
        while at <= k:
            builder.comm(node)
            node, at = next(pending)
        builder.compute(task)
    assert node == -1, "communication after the Update"
    return builder.draft


class _RoleBuilder:
    """Appends instructions in program order and derives their waits from the edges of the graph."""

    def __init__(self, role: str, graph: Graph, deps: Dependencies, maker: PartMaker, seconds: InstructionSeconds) -> None:
        self.graph, self.deps, self.maker, self.seconds = graph, deps, maker, seconds
        self.draft = RoleDraft(role)
        self.count: dict[str, int] = {COMPUTE: 0}
        self.seen: dict[str, dict[str, int]] = {}
        self.done: dict[int, tuple[str, int]] = {}
        self.last_compute = -1

    def compute(self, task: Task) -> None:
        waits = self._waits(task, COMPUTE)
        parts = self.maker.task(self.deps, task)
        self.last_compute = len(self.draft.streams)
        self._append(COMPUTE, parts, waits, self.seconds.compute([part[1] for part in parts]), task)

    def comm(self, i: int) -> None:
        node = self.deps.nodes[i]
        part = self.maker.comm(node)
        waits = self._waits([i], node.stream)
        if node.writes:  # its buffer is made right after the latest compute instruction
            if self.last_compute >= 0:
                self.draft.allocs_after.setdefault(self.last_compute, []).extend(node.writes)
                waits[COMPUTE] = self.count[COMPUTE]
            else:
                self.draft.allocs_first.extend(node.writes)
        self._append(node.stream, [part], waits, self._comm_seconds(node), [i])

    def _comm_seconds(self, node: Node) -> float:
        if isinstance(node.op, AllReduce):
            return self.seconds.reduction(self.graph.buckets[node.op.bucket] if node.op.bucket else None)
        return self.seconds.transfer(self.maker.nbytes((*node.reads, *node.writes)[0]))

    def _append(self, stream: str, parts: list[DraftPart], waits: dict[str, int], seconds: float, nodes: Task) -> None:
        n = self.count[stream] = self.count.get(stream, 0) + 1
        draft = self.draft
        draft.streams.append(stream)
        draft.parts.append(parts)
        draft.waits.append(unseen(waits, self.seen.setdefault(stream, {})))
        draft.seconds.append(seconds)
        for i in nodes:
            self.done[i] = (stream, n)

    def _waits(self, nodes: Task, stream: str) -> dict[str, int]:
        """What the nodes need from other streams of their role, of which alone `done` knows. (A receive needs its send, which is
        on another role: a rendezvous.)"""
        out: dict[str, int] = {}
        done = self.done
        for i in nodes:
            for j in self.deps.before[i]:
                if j in done:
                    other, n = done[j]
                    if other != stream and n > out.get(other, 0):
                        out[other] = n
        return out


def _states(graph: Graph, training: Training) -> dict[str, tuple[State, ...]]:
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


def _roles(graph: Graph, drafts: list[RoleDraft], states: dict[str, tuple[State, ...]]) -> tuple[RolePlan, ...]:
    """The roles with their frees, which a run without them under canonical durations decides."""
    prepared = prepare_orders([draft.issue_order() for draft in drafts], graph.channels.values())
    durations = [s for draft in drafts for s in draft.seconds]
    times = sweep(prepared, durations, latency=graph.program.hop)
    out = []
    for draft, offset in zip(drafts, prepared.offsets, strict=False):
        program = draft.instructions(releases(draft, offset, times))
        streams = tuple(dict.fromkeys([COMPUTE, *draft.streams]))
        placed = graph.roles[draft.role]
        first = tuple(draft.allocs_first)
        out.append(RolePlan(draft.role, placed, graph.mesh.ranks(placed), program, streams, states[draft.role], first))
    return tuple(out)
