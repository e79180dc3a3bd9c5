"""Nodes to parts: B becomes I and W, batch tensors get a Load and the loss its Seed at their first reader on a role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from piper_compiler.durations import InstructionSeconds, collective_bytes
from piper_compiler.passes.dependencies import Dependencies
from piper_compiler.ports import kept, port_category, steps_of, value_reads, value_writes
from piper_ir.graph import Graph, GraphValue, Node
from piper_ir.ops import Collective, Compute, Load, Op, Seed
from piper_ir.plan import Category, is_state
from piper_ir.program import Chunk
from piper_ir.program import Step as ChunkStep
from piper_ir.sizes import TensorSpec, bind

Kind = tuple[TensorSpec, Category]
Pick = Callable[[Sequence[str]], tuple[str, ...]]


DraftPart = tuple[str, Op, int, tuple[str, ...], tuple[str, ...]]
"""The fields of a Part without its frees: node, op, microbatch, reads, writes."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """How the Compute nodes of a step of equal chunks become parts. Values are counted through: the reads of the node, its
    writes, what F keeps (`kept`), what I hands to W (`inner`, whether or not W is a node of its own), the latter two by port.
    `made`: those that come into being, with their `kinds`; `steps`: of each part its step, and which values it reads and
    writes."""

    kept: tuple[str, ...]
    inner: tuple[str, ...]
    made: Pick
    kinds: tuple[Kind, ...]
    steps: tuple[tuple[ChunkStep, Pick, Pick], ...]


@dataclass(frozen=True, slots=True)
class _Template:
    """A shape with the names of one chunk, for all microbatches."""

    kept: list[str]
    inner: list[str]
    made: Pick
    kinds: tuple[Kind, ...]
    parts: list[tuple[str, Compute, Pick, Pick]]


class PartMaker:
    """Makes the parts of instructions, in program order role by role, and the table of bound values; says how long instructions
    take (`InstructionSeconds`). `rows`: of one microbatch on one rank; `shares`: how many of those a batch has (microbatches
    times data-parallel width)."""

    def __init__(self, graph: Graph, chunks: dict[str, Chunk], rows: int, shares: int, seconds: InstructionSeconds) -> None:
        self.graph, self.chunks, self.rows, self.seconds = graph, chunks, rows, seconds
        self.seed = 1.0 / shares if graph.program.loss_kind == "mean" else 1.0
        self.kinds: dict[str, Kind] = {}
        self.bound: dict[int, Kind] = {}  # by the id of a value of the graph, which microbatches share
        self.sizes: dict[int, int] = {}  # likewise, of specs that are kept here
        self.kept: dict[tuple[str, int], list[str]] = {}  # (chunk, microbatch) -> values
        self.templates: dict[int, _Template] = {}  # likewise, of an op
        self.shapes: dict[tuple[object, ...], _Shape] = {}  # by what equal layers share

    def task(self, deps: Dependencies, task: Sequence[int]) -> tuple[list[DraftPart], float]:
        """Of one compute instruction, which runs these nodes."""
        out: list[DraftPart] = []
        writer = self.graph.writer
        for i in task:
            node = deps.node(i)
            reads = tuple([v if v in writer else self._source(v, node, out) for v in node.reads])
            if isinstance(node.op, Compute):
                self._compute(node, node.op, reads, out)
            else:
                self._declare(node.writes)
                out.append((node.id, node.op, node.mb, reads, node.writes))
        return out, self.seconds.compute([part[1] for part in out])

    def comm(self, deps: Dependencies, i: int) -> tuple[list[DraftPart], float]:
        """The part of a communication instruction."""
        node = deps.node(i)
        self._declare(node.writes)
        if isinstance(node.op, Collective):
            seconds = self.seconds.collective(collective_bytes(self.graph, node, node.op, self.rows))
        else:
            seconds = self.seconds.transfer(self.nbytes((*node.reads, *node.writes)[0]))
        return [(node.id, node.op, node.mb, node.reads, node.writes)], seconds

    def nbytes(self, value: str) -> int:
        """Bytes of a value that has been made."""
        spec = self.kinds[value][0]
        if id(spec) not in self.sizes:
            self.sizes[id(spec)] = bind(spec.nbytes, 0)
        return self.sizes[id(spec)]

    def _source(self, value: str, node: Node, out: list[DraftPart]) -> str:
        """A batch tensor or the gradient of the loss, made on first use on the role."""
        held = self.graph.values[value]
        name = f"{value}#{node.role}"
        if name not in self.kinds:
            self.kinds[name] = self._bound(held)
            if held.category == "batch":
                out.append((f"load.{name}", Load(value.rpartition("@")[0]), node.mb, (), (name,)))
            else:
                out.append((f"seed.{name}", Seed(self.seed, held.spec.dtype), node.mb, (), (name,)))
        return name

    def _compute(self, node: Node, op: Compute, reads: tuple[str, ...], out: list[DraftPart]) -> None:
        template = self.templates.get(id(op))
        if template is None:
            template = self.templates[id(op)] = self._template(self.chunks[op.chunk], op)
        mb = node.mb
        suffix = f"@{mb}"
        mine = self.kept.get((op.chunk, mb))
        if mine is None:  # F comes first; the names are made once
            mine = self.kept[(op.chunk, mb)] = [name + suffix for name in template.kept]
        ids = [*reads, *node.writes, *mine, *[name + suffix for name in template.inner]]
        self.kinds.update(zip(template.made(ids), template.kinds, strict=True))
        out += [(name + suffix, step, mb, read(ids), written(ids)) for name, step, read, written in template.parts]

    def _template(self, chunk: Chunk, op: Compute) -> _Template:
        key = (op.step, id(chunk.ports), *map(id, chunk.steps.values()), *[i.kind for i in chunk.inputs])
        shape = self.shapes.get(key)
        if shape is None:
            shape = self.shapes[key] = _shape(chunk, op)
        kept, inner = ([f"{chunk.id}:{p}" for p in ports] for ports in (shape.kept, shape.inner))
        parts = [(f"{chunk.id}.{step}", Compute(chunk.id, step), read, written) for step, read, written in shape.steps]
        return _Template(kept, inner, shape.made, shape.kinds, parts)

    def _declare(self, values: tuple[str, ...]) -> None:
        for v in values:
            if v not in self.kinds:
                self.kinds[v] = self._bound(self.graph.values[v])

    def _bound(self, held: GraphValue) -> Kind:
        known = self.bound.get(id(held))
        if known is None:
            known = self.bound[id(held)] = held.spec.bind(self.rows), held.category
        return known


def _shape(chunk: Chunk, op: Compute) -> _Shape:
    present = steps_of(chunk, op.step)
    given = [*value_writes(chunk, op.step)]
    known = [*value_reads(chunk, op.step), *given, *kept(chunk)]
    inner = tuple(dict.fromkeys(p for s in present for p in _ports(chunk, s) if p not in known))
    at = {port: k for k, port in enumerate((*known, *inner))}
    steps = []
    for step in present:
        sig = chunk.steps[step]
        read = _pick([at[p] for p in sig.reads if not is_state(chunk, p)])
        steps.append((step, read, _pick([at[p] for p in sig.writes])))
    made = [p for s in present for p in chunk.steps[s].writes]
    kinds = tuple((chunk.ports[p], port_category(p)) for p in made)
    return _Shape(kept(chunk), inner, _pick([at[p] for p in made]), kinds, tuple(steps))


def _ports(chunk: Chunk, step: ChunkStep) -> tuple[str, ...]:
    """The ports of a step that are values."""
    sig = chunk.steps[step]
    return tuple(p for p in (*sig.reads, *sig.writes) if not is_state(chunk, p))


def _pick(places: list[int]) -> Pick:
    """The function that takes these places of a list."""
    if not places:
        return lambda values: ()
    if len(places) == 1:
        (place,) = places
        return lambda values: (values[place],)
    return itemgetter(*places)
