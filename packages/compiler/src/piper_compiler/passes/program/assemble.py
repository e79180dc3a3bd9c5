"""Make the parts of a plan beside its programs: roles with their states, chunks with their sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import piper_ir.plan.plan_pieces  # noqa: F401 - a quicker way to the text of plans
from piper_compiler.request import CompileRequest, Training
from piper_ir.graph.graph import Graph
from piper_ir.ground.sizes import bind
from piper_ir.plan.instr_table import InstrTable
from piper_ir.plan.plan import COMPUTE, Plan, RolePlan, State, Values
from piper_ir.plan.plan_bytes import flat_bytes
from piper_ir.plan.table_kinds import TableKinds
from piper_ir.program.ops import KEEP_ALL, Compute
from piper_ir.program.program import Chunk


def plan_of(
    graph: Graph,
    chunks: dict[str, Chunk],
    rows: int,
    programs: list[InstrTable],
    request: CompileRequest,
) -> Plan:
    """Return the plan, without its peaks."""
    program, training, options = graph.program, request.training, request.options
    states_by_role = states(graph, training)
    roles = [
        role_plan(graph, role, table, states_by_role[role])
        for role, table in zip(graph.roles, programs, strict=True)
    ]
    return Plan(
        program.key if request.keyed else "",
        graph.mesh,
        rows,
        graph.microbatches,
        graph.replicated,
        tuple(roles),
        tuple(graph.channels.values()),
        tuple(graph.buckets.values()),
        Values(TableKinds(programs)),
        tuple([c for c in chunks.values() if c.keep == KEEP_ALL]),
        program.params,
        program.buffers,
        tuple(replace(b, spec=b.spec.bind(rows)) for b in program.batch),
        program.loss_kind,
        program.hop,
        options.recv_ahead,
        training.tokens_per_row,
        options.device,
        variants=tuple([c for c in chunks.values() if c.keep != KEEP_ALL]),
        shared=tuple(axis for axis, _ in program.axes),
        experts=tuple(axis for axis, _ in program.experts),
        constants=program.constants,
        evaluates=request.evaluates,
        cuda_graph=options.cuda_graph,
    )


def role_plan(graph: Graph, role: str, program: InstrTable, held: tuple[State, ...]) -> RolePlan:
    """Return one role of a plan."""
    idle = [
        c.stream_on(role) for c in graph.channels.values() if role in c.roles
    ]  # of buckets that nothing gathers
    streams = tuple(dict.fromkeys([COMPUTE, *program.streams, *idle]))
    placed = graph.roles[role]
    first = tuple(map(program.values.name, program.first))
    return RolePlan(role, placed, graph.mesh.ranks(placed), program, streams, held, first)


def bound_chunks(graph: Graph, rows: int) -> dict[str, Chunk]:
    """Return the chunks by name, with int sizes and the coordinates that directives added.

    Variants follow on the chunks of the program, as far as nodes run them.
    """
    used = {
        n.op.variant for n in graph.sequence if isinstance(n.op, Compute) and n.op.keep != KEEP_ALL
    }
    variants = [c for c in graph.program.bound_variants(rows) if c.variant in used] if used else []
    chunk_by_name = {}
    for chunk in (*graph.program.bound(rows), *variants):
        node = graph.compute(chunk.id, "F")[0]
        coords = {
            k: v
            for k, v in node.coords.items()
            if k not in ("chunk", "phase", "op", "mb") and isinstance(v, int)
        }
        chunk_by_name[chunk.variant] = replace(chunk, coords=coords)
    return chunk_by_name


def states(graph: Graph, training: Training) -> dict[str, tuple[State, ...]]:
    """Return the persistent state of each role.

    It consists of parameters in buckets (flat, with their padding), their masters, other parameters, gradients,
    optimizer state and buffers.
    """
    states_by_role: dict[str, dict[str, State]] = {role: {} for role in graph.roles}
    bucketed = {p for b in graph.buckets.values() for p in b.params}
    for bucket in graph.buckets.values():
        mine = [
            State(kind, bucket.id, size, True, bucket.on_host(kind))
            for kind, size in flat_bytes(bucket, graph.mesh).items()
        ]
        optim = training.state_bytes(
            replace(bucket, numel=bucket.numel // graph.mesh.degree(bucket.shard.optim))
        )
        if bucket.group in training.whole_groups:  # of some matrices of each stack
            optim //= graph.mesh.degree(bucket.parts)
        if optim:
            mine.append(State("optim", bucket.id, optim, True, bucket.host))
        for role in bucket.roles:
            states_by_role[role].update({s.id: s for s in mine})
    specs = {p.name: p.spec for p in graph.program.params} | {
        b.name: b.spec for b in graph.program.buffers
    }
    for chunk in graph.program.chunks:
        kinds: dict[str, Literal["param", "buffer"]] = {
            e.ref: e.kind for e in chunk.inputs if e.kind in ("param", "buffer")
        }
        kinds |= {
            o.ref: "buffer" for o in chunk.outputs if o.kind == "buffer"
        }  # replaced without being read
        alone = [
            State(kind, ref, bind(specs[ref].nbytes, 0))
            for ref, kind in kinds.items()
            if ref not in bucketed
        ]
        for role in dict.fromkeys(node.role for node in graph.compute(chunk.id, "F")):
            states_by_role[role].update({s.id: s for s in alone})
    return {role: tuple(states.values()) for role, states in states_by_role.items()}
