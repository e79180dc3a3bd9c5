"""Nodes to parts: B becomes I and W, batch tensors get a Load and the loss its Seed at their first reader on a role."""

from __future__ import annotations

from piper_compiler.passes.dependencies import Dependencies
from piper_compiler.passes.fuse import Task
from piper_compiler.ports import signatures, value_reads, value_writes
from piper_ir.graph import Graph, Node
from piper_ir.ops import Compute, Load, Seed
from piper_ir.plan import Part, Value, is_state
from piper_ir.program import Chunk, Step
from piper_ir.sizes import TensorSpec


class PartMaker:
    """Makes parts and the table of bound values. `rows`: of one microbatch; `replicas`: data-parallel width."""

    def __init__(self, graph: Graph, chunks: dict[str, Chunk], rows: int, replicas: int) -> None:
        self.graph, self.chunks, self.rows = graph, chunks, rows
        self.seed = 1.0 / (graph.microbatches * replicas) if graph.program.loss_kind == "mean" else 1.0
        self.values: dict[str, Value] = {}
        self.loaded: set[str] = set()
        self.specs: dict[TensorSpec, TensorSpec] = {}
        self.ports: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {}

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
        chunk = self.chunks[op.chunk]
        if (op.chunk, op.step) not in self.ports:
            self.ports[(op.chunk, op.step)] = value_reads(chunk, op.step), value_writes(chunk, op.step)
        inward, outward = self.ports[(op.chunk, op.step)]
        values = dict(zip(inward, reads, strict=True)) | dict(zip(outward, node.writes, strict=True))
        steps: list[Step] = ["I", "W"] if op.step == "B" else [op.step]
        parts = []
        for step in steps:
            sig = chunk.steps.get(step)
            if sig is None or sig.empty:
                continue
            for port in sig.writes:
                if port not in values:
                    values[port] = f"{chunk.id}:{port}@{node.mb}"
                    self.values[values[port]] = Value(values[port], chunk.ports[port], "activation")
            read = tuple([values[p] for p in sig.reads if not is_state(chunk, p)])
            written = tuple([values[p] for p in sig.writes])
            parts.append(Part(f"{chunk.id}.{step}@{node.mb}", Compute(chunk.id, step), node.mb, read, written))
        self._declare(node.writes)
        assert len(parts) == len(signatures(chunk, op.step))
        return parts

    def _declare(self, values: tuple[str, ...]) -> None:
        for v in values:
            if v not in self.values:
                held = self.graph.values[v]
                self.values[v] = Value(v, self._bound(held.spec), held.category)

    def _bound(self, spec: TensorSpec) -> TensorSpec:
        if spec not in self.specs:
            self.specs[spec] = spec.bind(self.rows)
        return self.specs[spec]
