"""Turn nodes into parts: B becomes I and W, and batch tensors and the loss get their sources.

Under a policy of recomputation R comes before I, or before W without I, unless it is a node of its own. A B that is one
step of its chunk stays one part. A batch tensor
gets a Load and the loss its Seed at their first reader on a role. Parts are made once for all microbatches: their
values are numbers of microbatch 0 (see `piper_ir.plan.instr_table`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from piper_compiler.durations import BoundChunks, collective_bytes
from piper_compiler.passes.steps.adder import HeldValues
from piper_compiler.passes.steps.offloading import moved
from piper_compiler.ports import (
    BACKWARD,
    kept,
    port_category,
    signatures,
    steps_of,
    value_reads,
    value_writes,
)
from piper_ir.graph.graph import Graph, Node
from piper_ir.ground.node_ids import compute_id
from piper_ir.ground.sizes import TensorSpec, bind
from piper_ir.plan.instr_table import PartTemplate, ValueTable
from piper_ir.plan.plan import HOST, Category, is_state
from piper_ir.program.ops import Collective, Compute, Load, Seed, Update
from piper_ir.program.program import Chunk
from piper_ir.program.program import Step as ChunkStep

ValueSpec = tuple[TensorSpec, Category]
Pick = Callable[[Sequence[int]], tuple[int, ...]]

LATER: Mapping[str, tuple[ChunkStep, ...]] = {
    "F": ("R", *BACKWARD),
    "R": BACKWARD,
    "I": ("W",),
    "W": (),
    "B": (),
}
"""The steps of a chunk that follow each of its steps."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Say how the Compute nodes of a step of equal chunks become parts.

    Values are numbered in one sequence: the reads of the node, its writes, and `own`.

    Attributes:
        own: the ports of F's saved tensors and of values that I hands to W, whether or not W is a node of its own.
        made: picks the values that this step writes.
        kinds: size and category of these values.
        steps: for each part its step, and picks of its reads, its writes and its own values that no later step reads.
    """

    own: tuple[str, ...]
    made: Pick
    kinds: tuple[ValueSpec, ...]
    steps: tuple[tuple[ChunkStep, Pick, Pick, Pick], ...]


@dataclass(frozen=True, slots=True)
class Made:
    """Hold a part and the fate of its values.

    Attributes:
        reads: the values among its reads that another node may use.
        writes: the values among its writes that another node may use.
        inside: the values that die in it wherever it runs, because no other node may use them.
    """

    part: PartTemplate
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    inside: tuple[int, ...]


class PartMaker:
    """Make parts and the table of bound values, and say how long instructions take.

    `shares` is the number of microbatches in a batch: microbatches times data-parallel width.
    """

    def __init__(self, graph: Graph, bound: BoundChunks, shares: int) -> None:
        self.graph, self.chunks = graph, bound.by_name
        self.rows, self.seconds = bound.rows, bound.seconds
        self.count = graph.microbatches
        self.seed = 1.0 / shares if graph.program.loss_kind == "mean" else 1.0
        self.scaled = any(isinstance(n.op, Update) and n.op.scaled for n in graph.sequence)
        self.places: dict[str, int] = {}
        self.tails: list[str] = []
        self.kinds: list[ValueSpec] = []
        self.whole: list[bool] = []
        self.bound: dict[
            int, TensorSpec
        ] = {}  # by the id of a spec of the graph, which layers share
        self.shapes: dict[tuple[object, ...], _Shape] = {}  # by the key that equal layers share
        self.made: dict[
            tuple[int, HeldValues], list[Made]
        ] = {}  # by the identity of a node, whose parts differ in the values that they hold, and its offloaded tensors
        self.home = {name: b.id for b in graph.buckets.values() for name in b.params}
        self.needed: dict[
            tuple[str, str], frozenset[tuple[str, str]]
        ] = {}  # by variant and step, see `_needs`

    def values(self) -> ValueTable:
        """Return the values that parts have named."""
        return ValueTable(
            tuple(self.places), tuple(self.tails), tuple(self.kinds), tuple(self.whole), self.count
        )

    def sources(self, node: Node) -> tuple[str, ...]:
        """Return the batch tensors and gradients of the loss that a node reads."""
        return tuple([v for v in node.reads if v not in self.graph.writers])

    def load(self, value: str, role: str) -> Made:
        """Return the part that makes a batch tensor or the gradient of the loss on a role."""
        graph_value, number = self.graph.values[value], self._source(value, role)
        tail = f"#{role}"
        if graph_value.category == "batch":
            part = PartTemplate(f"load.{value}{tail}", tail, Load(value), (), (number,))
        else:
            seed = Seed(self.seed, graph_value.spec.dtype, self.scaled)
            part = PartTemplate(f"seed.{value}{tail}", tail, seed, (), (number,))
        return Made(part, (), (number,), ())

    def node(self, node: Node, held: HeldValues = ()) -> list[Made]:
        """Return the parts of a node, each with the values among `held` that it uses."""
        if isinstance(node.op, Compute):
            if not held:
                return self._compute(node, node.op, {})
            key = id(node), tuple(entry for entry in held if entry[0] == HOST)
            if key not in self.made:
                self.made[key] = self._compute(node, node.op, moved(held))
            return [self._holding(entry, held) for entry in self.made[key]]
        if node.mbs is None:
            reads = [self._value(v) + max(mb, 0) for v, mb in self.graph.reads_at(node, -1)]
        else:
            reads = [self._read(v, node.role) for v in node.reads]
        writes = [self._value(v) for v in node.writes]
        part = PartTemplate(node.id, node.tail, node.op, tuple(reads), tuple(writes))
        return [Made(part, part.reads, part.writes, ())]

    def _holding(self, made: Made, held: HeldValues) -> Made:
        """Return a part with the values that it uses in place of states which ranks share."""
        op, part = made.part.op, made.part
        assert isinstance(op, Compute)
        needs = self.needed.get((op.variant, op.step)) or self._needs(op)
        mine = tuple(
            [self._value(v) for category, bucket, v in held if (category, bucket) in needs]
        )
        whole = PartTemplate(
            part.node, part.tail, op, part.reads, part.writes, part.frees, part.ahead, mine
        )
        return Made(whole, made.reads, made.writes, made.inside)

    def _needs(self, op: Compute) -> frozenset[tuple[str, str]]:
        """Return the buckets that a step may hold, with their category.

        It reads their parameters, or adds to their gradients.
        """
        chunk = self.chunks[op.variant]
        sig = chunk.steps[op.step]
        read = {chunk.inputs[int(p[2:])].ref for p in sig.reads if p.startswith("in")}
        used = {"gathered": read, "reduced": {chunk.inputs[k].ref for k in sig.accumulates}}
        needs = frozenset(
            (category, self.home[name])
            for category, names in used.items()
            for name in names
            if name in self.home
        )
        self.needed[op.variant, op.step] = needs
        return needs

    def transfer_seconds(self, node: Node, part: PartTemplate) -> float:
        """Return the canonical seconds of a communication."""
        if isinstance(node.op, Collective):
            nbytes = collective_bytes(self.graph, node, node.op, self.rows)
            host = node.op.law.route == "host"
            return self.seconds.host_copy(nbytes) if host else self.seconds.collective(nbytes)
        spec, _ = self.kinds[(*part.reads, *part.writes)[0] // self.count]
        return self.seconds.transfer(bind(spec.nbytes, 0))

    def _compute(self, node: Node, op: Compute, away: Mapping[str, str]) -> list[Made]:
        """Return the parts of a node; `away` has its tensors that wait on the host (see `moved`)."""
        chunk = self.chunks[op.variant]
        key = (
            op.step,
            op.apart,
            id(chunk.ports),
            *map(id, chunk.steps.values()),
            *[i.kind for i in chunk.inputs],
        )
        shape = self.shapes.get(key)
        if shape is None:
            shape = self.shapes[key] = _shape(chunk, op)
        numbers = [
            *[self._read(away.get(v, v), node.role) for v in node.reads],
            *[self._value(v) for v in node.writes],
        ]
        own_values = [f"{chunk.id}:{port}" for port in shape.own]
        ids = [*numbers, *[self._own(v, away.get(v, v)) for v in own_values]]
        for number, kind in zip(shape.made(ids), shape.kinds, strict=True):
            self.kinds[number // self.count] = kind
        own = {i for i, v in zip(ids[len(numbers) :], own_values, strict=True) if v not in away}
        parts = []
        for step, read, written, dying in shape.steps:
            part = PartTemplate(
                compute_id(chunk.id, step),
                "",
                Compute(chunk.id, step, chunk.keep),
                read(ids),
                written(ids),
            )
            reads, writes = (
                tuple([v for v in vs if v not in own]) for vs in (part.reads, part.writes)
            )
            parts.append(
                Made(part, reads, writes, tuple(dict.fromkeys(v for v in dying(ids) if v in own)))
            )
        return parts

    def _own(self, value: str, now: str) -> int:
        """Return the number of a value that stays in its chunk, or of its copy `now`."""
        return self._place(value, "", None) if now == value else self._value(now)

    def _read(self, value: str, role: str) -> int:
        known = value in self.graph.writers or value in self.places
        return self._value(value) if known else self._source(value, role)

    def _source(self, value: str, role: str) -> int:
        graph_value = self.graph.values[value]
        return self._place(
            f"{value}#{role}", f"#{role}", (self._bound(graph_value.spec), graph_value.category)
        )

    def _value(self, value: str) -> int:
        if value in self.places:
            return self.places[value] * self.count
        graph_value = self.graph.values[value]
        writer = self.graph.families[self.graph.writers[value][0]][0]
        return self._place(
            value,
            graph_value.tail,
            (self._bound(graph_value.spec), graph_value.category),
            writer.mbs is None,
        )

    def _place(self, value: str, tail: str, kind: ValueSpec | None, whole: bool = False) -> int:
        """Return the number of a value in microbatch 0; an unknown kind comes from the part that writes it."""
        place = self.places.get(value)
        if place is None:
            place = self.places[value] = len(self.places)
            self.tails.append(tail)
            self.kinds.append(kind or _UNKNOWN)
            self.whole.append(whole)
        return place * self.count

    def _bound(self, spec: TensorSpec) -> TensorSpec:
        known = self.bound.get(id(spec))
        if known is None:
            known = self.bound[id(spec)] = spec.bind(self.rows)
        return known


_UNKNOWN: ValueSpec = (TensorSpec((), "uint8"), "activation")


def _shape(chunk: Chunk, op: Compute) -> _Shape:
    present = steps_of(chunk, op.step, op.apart)
    outer = [*value_reads(chunk, op.step, op.apart), *value_writes(chunk, op.step, op.apart)]
    known = [*outer, *kept(chunk)]
    inner = tuple(dict.fromkeys(p for s in present for p in _ports(chunk, s) if p not in known))
    at = {port: k for k, port in enumerate((*known, *inner))}
    steps = []
    for step in present:
        sig = chunk.steps[step]
        read = [p for p in sig.reads if not is_state(chunk, p)]
        later = {
            p for s in LATER[step] for more in signatures(chunk, s, apart=True) for p in more.reads
        }
        dying = [p for p in dict.fromkeys((*read, *sig.writes)) if p not in later]
        reads, writes, gone = (_pick([at[p] for p in ports]) for ports in (read, sig.writes, dying))
        steps.append((step, reads, writes, gone))
    written = [p for s in present for p in chunk.steps[s].writes]
    kinds = tuple((chunk.ports[p], port_category(p)) for p in written)
    return _Shape((*kept(chunk), *inner), _pick([at[p] for p in written]), kinds, tuple(steps))


def _ports(chunk: Chunk, step: ChunkStep) -> tuple[str, ...]:
    """Return the ports of a step that are values."""
    sig = chunk.steps[step]
    return tuple(p for p in (*sig.reads, *sig.writes) if not is_state(chunk, p))


def _pick(places: list[int]) -> Pick:
    """Return the function that picks these places of a list."""
    if not places:
        return lambda values: ()
    if len(places) == 1:
        (place,) = places
        return lambda values: (values[place],)
    return itemgetter(*places)
