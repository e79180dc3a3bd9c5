"""The instructions of an outline: those that differ in their microbatch only are one kind, made once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from piper_compiler.passes.arrays import Ints, begins, ints
from piper_compiler.passes.dependencies import Dependencies
from piper_compiler.passes.draft import Draft
from piper_compiler.passes.parts import DraftPart, PartMaker
from piper_compiler.passes.release import Uses
from piper_compiler.ports import BACKWARD, signatures
from piper_ir.graph import Graph
from piper_ir.ops import Compute
from piper_ir.plan import COMPUTE, Category, Instr, Part, Plan, part_peak
from piper_ir.program import Chunk, Step

LATER: Mapping[str, tuple[Step, ...]] = {"F": BACKWARD, "I": ("W",), "W": ()}
"""The steps of a chunk that follow one of them."""

Dying = tuple[tuple[int, int], ...]
"""What dies in an instruction and is not in it alone: the part that it dies after, and its place in `Kinds.names`."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What an instruction does to the memory of its role: most bytes above those before, bytes more afterwards, the latter by
    category. The former are `fullest` less the first `gone` bytes of what dies in part `part`."""

    most: int
    more: int
    after: Mapping[Category, int]
    fullest: Mapping[Category, int]
    gone: int
    part: int


@dataclass(slots=True)
class Kind:
    """`instr`: of microbatch 0; `seconds`: of each; `reads`, `writes`: per part, the places in `Kinds.names` of the values that
    another node may read; `inside`: per part the other values that die after it."""

    instr: Instr
    seconds: float
    reads: list[list[int]]
    writes: list[list[int]]
    inside: list[tuple[str, ...]]
    effects: dict[Dying, Effect] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.instr.parts

    def touched(self) -> Iterator[tuple[int, int]]:
        """The parts, each with the places of what it writes, then of what it reads."""
        for k, (reads, writes) in enumerate(zip(self.reads, self.writes, strict=True)):
            for place in (*writes, *reads):
                yield k, place


class Kinds:
    """The kinds of the instructions of a draft: `used[i]` is that of instruction i, `mb[i]` its microbatch; `instrs`: the
    kinds, each with its instructions. `names`: values in microbatch 0, `sizes`: their bytes. The value of place p there is
    number p * count + microbatch. `uses`: what the instructions do with values. Parts of instructions that compute are
    counted: `first_part` of each instruction, `instr_of_part`."""

    def __init__(self, graph: Graph, one: Dependencies, maker: PartMaker, count: int, draft: Draft, deps: Dependencies) -> None:
        self.graph, self.one, self.maker, self.count = graph, one, maker, count
        self.names: list[str] = []
        self.sizes: list[int] = []
        self._places: dict[str, int] = {}
        self._values: dict[str, tuple[list[int], list[int]]] = {}
        self._tasks: dict[tuple[int, ...], Kind] = {}
        self._sources: dict[tuple[int, ...], tuple[str, ...]] = {}
        self._loading: dict[tuple[tuple[int, ...], tuple[str, ...]], Kind] = {}
        self._held: dict[tuple[object, ...], int] = {}
        self._transfers: dict[int, Kind] = {}
        self._loaded: set[tuple[str, int]] = set()
        lead = ints([nodes[0] for nodes in draft.tasks])
        self.mb = ints(deps.mb)[lead]
        self.used = self._used(draft, deps, ints(deps.of)[lead].tolist())
        self.instrs = self._instrs()
        many = np.zeros(len(lead), np.int64)
        for kind, mine in self.instrs:
            many[mine] = len(kind.parts) if kind.instr.stream == COMPUTE else 0
        self.first_part = begins(many)
        self.instr_of_part = np.repeat(np.arange(len(many)), many)
        self.uses = self._uses()

    def _used(self, draft: Draft, deps: Dependencies, leads: list[int]) -> list[Kind]:
        """The kind of each instruction. `leads`: what its first node is."""
        of, mb, comm = deps.of, deps.mb, self.one.comm
        out: list[Kind] = []
        for nodes, lead in zip(draft.tasks, leads, strict=True):
            if comm[lead]:
                kind = self._transfers.get(lead)
                if kind is None:
                    kind = self._transfers[lead] = self._kind(self.one.nodes[lead].stream, *self.maker.comm(self.one, lead))
            else:
                like = tuple([of[i] for i in nodes])
                kind = self._tasks.get(like) or self._task(like, mb[nodes[0]])
            out.append(kind)
        return out

    def nbytes(self, value: int) -> int:
        return self.sizes[value // self.count]

    def effect(self, plan: Plan, kind: Kind, dying: Dying) -> Effect:
        """What such an instruction does to memory, given what dies in it."""
        most = more = gone = at = 0
        kinds = self.maker.kinds
        live: dict[Category, int] = {}
        fullest: dict[Category, int] = {}
        for k, (part, inside) in enumerate(zip(kind.parts, kind.inside, strict=True)):
            nbytes = {v: self.maker.nbytes(v) for v in (*part.reads, *part.writes)}
            frees = (*inside, *[self.names[place] for after, place in dying if after == k])
            dying_here = Part(part.node, part.op, part.mb, part.reads, part.writes, frees)  # `replace` takes twice the time
            held = more + self._above(plan, dying_here, nbytes)
            for v in part.writes:
                live[kinds[v][1]] = live.get(kinds[v][1], 0) + nbytes[v]
                more += nbytes[v]
            if held > most:
                # Less than its writes: at its fullest moment some of the inputs that die here were gone already.
                most, gone, at = held, max(0, more - held), k
                fullest = {**live, "workspace": max(0, held - more)}
            for v in frees:
                live[kinds[v][1]] = live.get(kinds[v][1], 0) - nbytes[v]
                more -= nbytes[v]
        known = kind.effects[dying] = Effect(most, more, live, fullest, gone, at)
        return known

    def _above(self, plan: Plan, part: Part, nbytes: Mapping[str, int]) -> int:
        """`part_peak`; for a step of equal chunks once for all in which the same inputs die."""
        op = part.op
        if not isinstance(op, Compute):
            return part_peak(plan, part, nbytes)
        assert op.step != "B", "a plan holds I and W parts; B exists in graphs only"
        chunk = plan.chunk(op.chunk)
        dying = [nbytes[v] if v in part.frees else -1 for v in part.reads]
        key = id(chunk.ports), id(chunk.steps[op.step]), *[i.kind for i in chunk.inputs], *dying
        if key not in self._held:
            self._held[key] = part_peak(plan, part, nbytes)
        return self._held[key]

    def _instrs(self) -> list[tuple[Kind, Ints]]:
        """The kinds, each with its instructions."""
        keys = list(map(id, self.used))
        kinds = dict(zip(keys, self.used, strict=True))
        number = {key: n for n, key in enumerate(kinds)}
        numbers = ints(map(number.__getitem__, keys))
        order = np.argsort(numbers, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
        return list(zip(kinds.values(), parts, strict=True))

    def _uses(self) -> Uses:
        far = 1 + max([len(list(kind.touched())) for kind, _ in self.instrs], default=0)
        touched = [[ints(())], [ints(())]]
        sent = [[ints(())], [ints(())]]
        for kind, instrs in self.instrs:
            mine = list(kind.touched())
            if not mine:
                continue
            mb = np.maximum(self.mb[instrs], 0)
            if kind.instr.stream == COMPUTE:
                keys = ints([part * far + k for k, (part, _) in enumerate(mine)])
                touched[0].append((ints([place for _, place in mine])[:, None] * self.count + mb).ravel())
                touched[1].append((keys[:, None] + self.first_part[instrs] * far).ravel())
            elif kind.reads[0]:
                sent[0].append((ints(kind.reads[0])[:, None] * self.count + mb).ravel())
                sent[1].append((np.arange(len(kind.reads[0]))[:, None] + instrs * far).ravel())
        (value, at), (carried, by) = (map(np.concatenate, columns) for columns in (touched, sent))
        order, sending = np.argsort(at), np.argsort(by)
        values = len(self.names) * self.count
        return Uses(values, value[order], at[order] // far, self.instr_of_part, carried[sending], by[sending] // far)

    def _task(self, like: tuple[int, ...], mb: int) -> Kind:
        """Of an instruction that runs nodes like these; the first that reads a source in its microbatch loads it."""
        sources = self._sources.get(like)
        if sources is None:
            sources = self._sources[like] = self._sources_of(like)
        fresh = tuple([v for v in sources if (v, mb) not in self._loaded])
        self._loaded.update([(v, mb) for v in fresh])
        kind = self._loading.get((like, fresh))
        if kind is None:
            for v in fresh:  # another kind may have loaded it for its microbatch 0
                self.maker.kinds.pop(v, None)
            kind = self._loading[like, fresh] = self._kind(COMPUTE, *self.maker.task(self.one, like))
            if not sources:
                self._tasks[like] = kind
        return kind

    def _sources_of(self, nodes: tuple[int, ...]) -> tuple[str, ...]:
        """The batch tensors and gradients of the loss that nodes read, as they are called on their role."""
        read = [(v, self.one.nodes[k].role) for k in nodes for v in self.one.nodes[k].reads]
        return tuple(dict.fromkeys([f"{v}#{role}" for v, role in read if v not in self.graph.writer]))

    def _kind(self, stream: str, drafts: list[DraftPart], seconds: float) -> Kind:
        parts = tuple([Part(*draft) for draft in drafts])
        made = {v for p in parts if not isinstance(p.op, Compute) for v in p.writes}
        shared = self.graph.values.keys() | made | self._places.keys()
        for p in parts:
            if p.node not in self._values:
                reads, writes = ([self._place(v) for v in vs if v in shared] for vs in (p.reads, p.writes))
                self._values[p.node] = reads, writes
        inside = [tuple([v for v in _dies_in(p, self.maker.chunks) if v not in shared]) for p in parts]
        values = [self._values[p.node] for p in parts]
        return Kind(Instr(stream, parts), seconds, [reads for reads, _ in values], [writes for _, writes in values], inside)

    def _place(self, value: str) -> int:
        place = self._places.get(value)
        if place is None:
            place = self._places[value] = len(self.names)
            self.names.append(value)
            self.sizes.append(self.maker.nbytes(value))
        return place


def _dies_in(part: Part, chunks: dict[str, Chunk]) -> list[str]:
    """The values of a part which no later step of its chunk reads."""
    if not isinstance(part.op, Compute):
        return []
    chunk = chunks[part.op.chunk]
    later = {p for step in LATER[part.op.step] for sig in signatures(chunk, step) for p in sig.reads}
    kept = {f"{chunk.id}:{port}@{part.mb}" for port in later}
    return [v for v in dict.fromkeys((*part.reads, *part.writes)) if v not in kept]
