"""Build the first graph of a program: one F and one B node per chunk, with data edges by value.

Nothing is split into microbatches and nothing is placed; directives do that.
"""

from __future__ import annotations

from collections.abc import Mapping

import piper_ir.graph.graph_json  # noqa: F401 - registers how `piper_ir.ground.codec.dumps` writes the graphs that are made here
from piper_compiler.ports import port_category, port_value, signatures, value_reads, value_writes
from piper_ir.graph.graph import Editor, Graph, Node
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.node_ids import compute_id
from piper_ir.program.costs import Costs
from piper_ir.program.ops import Add, Compute, Step
from piper_ir.program.program import Chunk, Program


def build_graph(program: Program, mesh: Mesh, costs: Costs | None = None) -> Graph:
    """Return the graph of one step on one device.

    Batch tensors and the tangent of the loss are values without a writer. `PartMaker` makes their Load and Seed parts
    once it is known which roles read them.
    """
    index = {c.id: i for i, c in enumerate(program.chunks)}
    edit = Graph(mesh, program, {}, {}, {}, {}, chunk_index=index, costs=costs).edit()
    for tensor in program.batch:
        edit.value(tensor.name, tensor.spec, "batch")
    for chunk in program.chunks:
        _add_compute(edit, chunk, "F")
    consumers = _gradient_consumers(program)
    for chunk in reversed(program.chunks):
        tangents = _add_tangents(edit, chunk, consumers)
        if signatures(chunk, "B"):
            _add_compute(edit, chunk, "B", tangents)
    return edit.done()


def _add_compute(
    edit: Editor, chunk: Chunk, step: Step, tangents: Mapping[str, str] | None = None
) -> None:
    coords = {**chunk.coords, "chunk": chunk.id, "phase": step, "op": "compute"}
    for port in value_writes(chunk, step):
        edit.value(f"{chunk.id}:{port}", chunk.ports[port], port_category(port))
    known = tangents or {}
    reads = tuple(known.get(p) or port_value(chunk, p) for p in value_reads(chunk, step))
    writes = tuple(f"{chunk.id}:{p}" for p in value_writes(chunk, step))
    edit.add(Node(compute_id(chunk.id, step), Compute(chunk.id, step), coords, reads, writes))


def _gradient_consumers(program: Program) -> dict[str, list[str]]:
    """Return for each value the gradients that its consumers send back, in program order."""
    gradients_by_value: dict[str, list[str]] = {}
    for chunk in program.chunks:
        writes = value_writes(chunk, "B")
        for k, entry in enumerate(chunk.inputs):
            if entry.kind == "value" and f"gin{k}" in writes:
                gradients_by_value.setdefault(entry.ref, []).append(f"{chunk.id}:gin{k}")
    return gradients_by_value


def _add_tangents(edit: Editor, chunk: Chunk, consumers: dict[str, list[str]]) -> dict[str, str]:
    """Add the tangents that a chunk's backward reads, and return their values by port.

    A value with one consumer gets that consumer's gradient as its tangent. With several consumers the tangent is the
    value "chunk:tan{k}", their sum, last consumer first: autograd adds in this order too, so the bits are the same.
    """
    read = value_reads(chunk, "B")
    coords: dict[str, int | str] = {**chunk.coords, "chunk": chunk.id, "phase": "B", "op": "add"}
    tangents = {}
    for k, output in enumerate(chunk.outputs):
        port = f"tan{k}"
        if port not in read:
            continue
        parts = consumers.get(f"{chunk.id}:out{k}", [])
        if output.kind == "loss":
            tangents[port] = edit.value(f"{chunk.id}:{port}", output.spec, "scalar")
            continue
        assert parts, f"{chunk.id} reads {port} but no consumer of its out{k} writes a gradient"
        if len(parts) == 1:
            tangents[port] = parts[0]
            continue
        tangents[port] = edit.value(f"{chunk.id}:{port}", output.spec, "gradient")
        edit.add(
            Node(f"{chunk.id}.sum{k}", Add(), coords, tuple(reversed(parts)), (tangents[port],))
        )
    return tangents
