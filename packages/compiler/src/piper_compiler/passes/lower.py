"""Graph to Plan: one program order per role, waits, allocations and frees, peaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from piper_compiler.durations import chunk_seconds
from piper_compiler.passes.complete import Training
from piper_compiler.passes.dependencies import Dependencies, dependencies
from piper_compiler.passes.fuse import Task, tasks
from piper_compiler.passes.parts import PartMaker
from piper_compiler.passes.positions import Positions, positions
from piper_compiler.passes.release import with_frees, without_repeats
from piper_compiler.passes.schedule import LINK, schedule
from piper_ir.costs import Costs
from piper_ir.graph import Graph
from piper_ir.memory import with_peaks
from piper_ir.ops import AllReduce, Compute, Recv, Send
from piper_ir.plan import COMPUTE, Instr, Plan, RolePlan, State
from piper_ir.program import Chunk
from piper_ir.sizes import ITEM_BYTES, bind
from piper_ir.timing import prepare, sweep


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
    states = _states(graph, training)
    roles = tuple(_role(graph, role, deps, work[role], where, maker, states[role]) for role in graph.roles)
    program = graph.program
    plan = Plan(
        program.key,
        graph.mesh,
        rows,
        graph.microbatches,
        graph.replicated,
        roles,
        tuple(graph.channels.values()),
        tuple(graph.buckets.values()),
        maker.values,
        tuple(chunks.values()),
        program.params,
        program.buffers,
        tuple(replace(b, spec=b.spec.bind(rows)) for b in program.batch),
        program.loss_kind,
        program.hop,
        options.recv_ahead,
        training.tokens_per_row,
    )
    return with_peaks(_with_frees(plan, costs))


def _bound_chunks(graph: Graph, rows: int) -> dict[str, Chunk]:
    """Chunks with int sizes and the coordinates that directives added."""
    out = {}
    for chunk in graph.program.chunks:
        node = graph.nodes[f"{chunk.id}.F@0"]
        coords = {k: v for k, v in node.coords.items() if k not in ("chunk", "phase", "op", "mb") and isinstance(v, int)}
        out[chunk.id] = replace(chunk.bind(rows), coords=coords)
    return out


def _role(
    graph: Graph,
    role: str,
    deps: Dependencies,
    work: list[Task],
    where: Positions,
    maker: PartMaker,
    states: tuple[State, ...],
) -> RolePlan:
    builder = _RoleBuilder(graph, deps, where, maker)
    pending = iter([*where.comm[role], (-1, 1 << 60)])
    node, at = next(pending)
    for k, task in enumerate(work):
        while at <= k:
            builder.comm(node)
            node, at = next(pending)
        builder.compute(k, task)
    assert node == -1, "communication after the Update"
    program = builder.finished()
    streams = tuple(dict.fromkeys([COMPUTE, *(i.stream for i in program)]))
    ranks = graph.mesh.ranks(graph.roles[role])
    return RolePlan(role, graph.roles[role], ranks, program, streams, states, tuple(builder.first))


class _RoleBuilder:
    """Appends instructions in program order and derives their waits from the edges of the graph."""

    def __init__(self, graph: Graph, deps: Dependencies, where: Positions, maker: PartMaker) -> None:
        self.graph, self.deps, self.where, self.maker = graph, deps, where, maker
        self.program: list[Instr] = []
        self.count: dict[str, int] = {}
        self.done: dict[int, tuple[str, int]] = {}
        self.allocs: dict[int, list[str]] = {}
        self.computes: list[int] = []
        self.first: list[str] = []

    def compute(self, k: int, task: Task) -> None:
        waits = self._waits(task, COMPUTE)
        self.computes.append(len(self.program))
        self._append(Instr(COMPUTE, tuple(self.maker.task(self.deps, task)), waits), task)

    def comm(self, i: int) -> None:
        node = self.deps.nodes[i]
        part = self.maker.comm(node)
        waits = dict(self._waits([i], node.stream))
        if part.writes:  # its buffer is made right after the latest compute instruction
            if self.computes:
                self.allocs.setdefault(self.computes[-1], []).extend(part.writes)
                waits[COMPUTE] = max(waits.get(COMPUTE, 0), self.count[COMPUTE])
            else:
                self.first.extend(part.writes)
        self._append(Instr(node.stream, (part,), tuple(waits.items())), [i])

    def finished(self) -> tuple[Instr, ...]:
        for k, values in self.allocs.items():
            self.program[k] = replace(self.program[k], allocs_after=tuple(values))
        return tuple(self.program)

    def _append(self, instr: Instr, nodes: Task) -> None:
        n = self.count[instr.stream] = self.count.get(instr.stream, 0) + 1
        self.program.append(instr)
        for i in nodes:
            self.done[i] = (instr.stream, n)

    def _waits(self, nodes: Task, stream: str) -> tuple[tuple[str, int], ...]:
        """What the nodes need from other streams of their role. (A receive needs its send, which is on another role: a
        rendezvous.)"""
        out: dict[str, int] = {}
        for i in nodes:
            for j in self.deps.before[i]:
                if j in self.done and self.deps.nodes[j].role == self.deps.nodes[i].role:
                    other, n = self.done[j]
                    if other != stream:
                        out[other] = max(out.get(other, 0), n)
        return tuple(out.items())


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


def _with_frees(plan: Plan, costs: Costs | None) -> Plan:
    """Decide frees by a run without them under canonical durations."""
    bare = replace(plan, roles=tuple(without_repeats(r) for r in plan.roles))
    prepared = prepare(bare)
    times = sweep(prepared, canonical_durations(bare, costs), latency=plan.hop)
    roles = [
        without_repeats(with_frees(role, offset, prepared, times))
        for role, offset in zip(bare.roles, prepared.offsets, strict=False)
    ]
    return replace(bare, roles=tuple(roles))


def canonical_durations(plan: Plan, costs: Costs | None = None) -> list[float]:
    """Seconds per instruction in the order of `piper_ir.timing.prepare`, without a cluster."""
    known: dict[tuple[str, str], float] = {}
    for chunk in plan.chunks:
        for step in chunk.steps:
            known[(chunk.id, step)] = chunk_seconds(chunk, step, costs)
    return [_seconds(plan, instr, known) for _, _, instr in plan.instructions()]


def _seconds(plan: Plan, instr: Instr, known: Mapping[tuple[str, str], float]) -> float:
    op = instr.parts[0].op
    match op:
        case Send() | Recv():
            value = (*instr.parts[0].reads, *instr.parts[0].writes)[0]
            return plan.values[value].nbytes / LINK
        case AllReduce(bucket=bucket) if bucket and plan.chunks and plan.chunks[0].steps["F"].cost.seconds is None:
            return plan.bucket(bucket).numel * ITEM_BYTES[plan.bucket(bucket).dtype] / LINK
        case _:
            return sum(known[(p.op.chunk, p.op.step)] for p in instr.parts if isinstance(p.op, Compute))
