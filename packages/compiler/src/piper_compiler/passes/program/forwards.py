"""Make the graph of an evaluation: the forwards of a complete training step, with their placement and their inputs.

Placement, microbatches, streams and channels stay, so that parameters are used where training has them. F saves nothing
for a backward: it is the F of the chunk's variant under the policy `FORGETS`. An Update of no buckets ends each role's
program: it waits for sends that are not done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from piper_ir.graph.graph import Graph, Node
from piper_ir.ground.node_ids import send_id
from piper_ir.program.ops import KEEP_ALL, Collective, Compute, Recv, Step, Update, variant_name
from piper_ir.program.program import Chunk, Program

K = TypeVar("K")
FORGETS = "inputs"
"""The policy of recomputation under which F keeps nothing, so that its program must have variants for it."""


def forwards_alone(graph: Graph) -> Graph:
    """Return the graph of an evaluation, given the complete one of a training step."""
    needed = _needed(graph)
    families = {
        id: tuple([_forgetting(node) for node in family])
        for id, family in graph.families.items()
        if id in needed
    }
    for node in graph.sequence:
        if isinstance(node.op, Update):
            families[f"end#{node.role}"] = (
                replace(node, id=f"end#{node.role}", op=Update(()), reads=()),
            )
    return replace(
        graph,
        program=forward_program(graph.program),
        families=families,
        writers=_within(graph.writers, families),
        users=_within(graph.users, families),
        order_edges={
            pair: k
            for pair, k in graph.order_edges.items()
            if all(id in families for id, _ in pair)
        },
        overlaps=(),
        index=_within(graph.index, families),
    )


def forwards_run(graph: Graph) -> dict[str, set[Step]]:
    """Return the steps that an evaluation runs in compiled groups: F of the variants that save nothing."""
    chunks = [chunk.id for chunk in graph.program.chunks if chunk.id not in graph.eager]
    return {variant_name(id, FORGETS): {"F"} for id in chunks}


def _needed(graph: Graph) -> set[str]:
    """Return the ids of the nodes that forwards need: themselves, all that lead to their inputs, and gathers."""
    todo = [id for id, family in graph.families.items() if any(_starts(node) for node in family)]
    needed: set[str] = set()
    while todo:
        id = todo.pop()
        if id in needed:
            continue
        needed.add(id)
        for node in graph.families[id]:
            todo += [writer for value in node.reads for writer in graph.writers.get(value, ())]
            if isinstance(node.op, Recv):
                todo.append(send_id(node.writes[0]))
    return needed


def _starts(node: Node) -> bool:
    """Return whether a node is a forward, or an all-gather of a bucket's parameters."""
    match node.op:
        case Compute(step=step):
            return step == "F"
        case Collective(bucket=bucket):
            return bool(bucket) and node.op.law.state == "param"
        case _:
            return False


def _forgetting(node: Node) -> Node:
    return (
        replace(node, op=replace(node.op, keep=KEEP_ALL, apart=False))
        if isinstance(node.op, Compute)
        else node
    )


def _within(
    table: Mapping[K, tuple[str, ...]], families: Mapping[str, object]
) -> dict[K, tuple[str, ...]]:
    kept = {key: tuple([id for id in ids if id in families]) for key, ids in table.items()}
    return {key: ids for key, ids in kept.items() if ids}


def forward_program(program: Program) -> Program:
    """Return a program whose chunks have F alone, and save nothing; equal layers still share their objects."""
    known: dict[tuple[int, int], tuple[Chunk, Chunk]] = {}
    chunks = []
    for chunk in program.chunks:
        variant = program.chunk(variant_name(chunk.id, FORGETS))
        key = id(variant.ports), id(variant.steps["F"])
        if key not in known:
            step = variant.steps["F"]
            ports = {
                port: variant.ports[port] for port in dict.fromkeys((*step.reads, *step.writes))
            }
            known[key] = variant, replace(variant, ports=ports, steps={"F": step})
        alike = known[key][1]
        inputs = tuple(replace(entry, needs_grad=False) for entry in chunk.inputs)
        outputs = tuple(replace(output, needs_grad=False) for output in chunk.outputs)
        chunks.append(
            replace(
                chunk,
                inputs=inputs,
                outputs=outputs,
                ports=alike.ports,
                steps=alike.steps,
                code=variant.code,
            )
        )
    return replace(program, chunks=tuple(chunks), variants=())
