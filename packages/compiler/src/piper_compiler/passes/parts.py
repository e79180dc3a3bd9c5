"""Nodes to parts: B becomes I and W, batch tensors get a Load and the loss its Seed at their first reader on a role."""

from __future__ import annotations

from piper_compiler.passes.dependencies import Dependencies
from piper_compiler.passes.fuse import Task
from piper_compiler.ports import value_reads, value_writes
from piper_ir.graph import Graph, Node
from piper_ir.ops import Compute, Load, Seed
from piper_ir.plan import Part, Value, is_state
from piper_ir.program import Chunk
from piper_ir.program import Step as ChunkStep
from piper_ir.sizes import TensorSpec

Inner = tuple[str, TensorSpec]
"""A port whose value stays inside of a Compute node."""
Step = tuple[str, Compute, tuple[int, ...], tuple[int, ...]]
"""Name and op of a part, and where its reads and writes stand among the values of its node."""


class PartMaker:
    """Makes parts and the table of bound values. `rows`: of one microbatch; `replicas`: data-parallel width."""

    def __init__(self, graph: Graph, chunks: dict[str, Chunk], rows: int, replicas: int) -> None:
        self.graph, self.chunks, self.rows = graph, chunks, rows
        self.seed = 1.0 / (graph.microbatches * replicas) if graph.program.loss_kind == "mean" else 1.0
        self.values: dict[str, Value] = {}
        self.loaded: set[str] = set()
        self.specs: dict[TensorSpec, TensorSpec] = {}
        self.steps: dict[Compute, tuple[list[Inner], list[Step]]] = {}

    def task(self, deps: Dependencies, task: Task) -> list[Part]:
        """The parts of one compute instruction, without frees."""
        out: list[Part] = []
        for i in task:
            node = deps.nodes[i]
            reads = tuple([self._source(v, node, out) for v in node.reads])
            if isinstance(node.op, Compute):
                out += self._compute(node, node.op, reads)
            else:
                out.append(Part(node.id, node.op, node.mb, reads, node.writes))
                self._declare(node.writes)
        return out

    def comm(self, node: Node) -> Part:
        """The one part of a communication instruction."""
        self._declare(node.writes)
        return Part(node.id, node.op, node.mb, node.reads, node.writes)

    def _source(self, value: str, node: Node, out: list[Part]) -> str:
        """The value to read; a batch tensor or loss gradient is made on first use on the role."""
        if value in self.graph.writer:
            return value
        held = self.graph.values[value]
        name = f"{value}#{node.role}"
        if name not in self.loaded:
            self.loaded.add(name)
            self.values[name] = Value(name, self._bound(held.spec), held.category)
            tensor = value.rpartition("@")[0]
            op = Load(tensor) if held.category == "batch" else Seed(self.seed, held.spec.dtype)
            kind = "load" if held.category == "batch" else "seed"
            out.append(Part(f"{kind}.{name}", op, node.mb, (), (name,)))
        return name

    def _compute(self, node: Node, op: Compute, reads: tuple[str, ...]) -> list[Part]:
        known = self.steps.get(op)
        if known is None:
            known = self.steps[op] = _step_plan(self.chunks[op.chunk], op)
        inner, steps = known
        mb = node.mb
        ids = [f"{op.chunk}:{port}@{mb}" for port, _ in inner]
        for id, (_, spec) in zip(ids, inner, strict=True):
            self.values[id] = Value(id, spec, "activation")
        values = (*reads, *node.writes, *ids)
        self._declare(node.writes)
        return [
            Part(f"{name}@{mb}", step, mb, tuple([values[k] for k in read]), tuple([values[k] for k in written]))
            for name, step, read, written in steps
        ]

    def _declare(self, values: tuple[str, ...]) -> None:
        for v in values:
            if v not in self.values:
                held = self.graph.values[v]
                self.values[v] = Value(v, self._bound(held.spec), held.category)

    def _bound(self, spec: TensorSpec) -> TensorSpec:
        if spec not in self.specs:
            self.specs[spec] = spec.bind(self.rows)
        return self.specs[spec]


def _step_plan(chunk: Chunk, op: Compute) -> tuple[list[Inner], list[Step]]:
    """How a Compute node becomes parts, for all microbatches: the values that stay inside of it, and per part its name, its op
    and which of the node's reads, its writes and the inner values, in this order, it reads and writes."""
    wanted: tuple[ChunkStep, ...] = ("I", "W") if op.step == "B" else (op.step,)
    present = [s for s in wanted if s in chunk.steps and not chunk.steps[s].empty]
    ports = [*value_reads(chunk, op.step), *value_writes(chunk, op.step)]
    inner = [p for s in present for p in chunk.steps[s].writes if p not in ports]
    at = {port: k for k, port in enumerate((*ports, *inner))}
    steps = []
    for step in present:
        sig = chunk.steps[step]
        read = tuple([at[p] for p in sig.reads if not is_state(chunk, p)])
        steps.append((f"{chunk.id}.{step}", Compute(chunk.id, step), read, tuple([at[p] for p in sig.writes])))
    return [(p, chunk.ports[p]) for p in inner], steps
