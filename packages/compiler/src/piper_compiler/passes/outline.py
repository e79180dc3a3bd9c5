"""Outlines: plans for their times and peaks of memory alone, which is what a search asks for.

The instructions of an outline, their streams and order are those of the plan, and so are the peaks. But they are those of
microbatch 0, shared by all microbatches, and say nothing of what is freed: names take most of the time of lowering. Waits are in
`prepared` alone. An outline can be timed, and not be verified, run or shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

from piper_compiler.durations import InstructionSeconds
from piper_compiler.passes.complete import Training
from piper_compiler.passes.dependencies import Dependencies, dependencies
from piper_compiler.passes.draft import DraftPart, Releases, RoleDraft
from piper_compiler.passes.fuse import Task
from piper_compiler.passes.lower import Options, bound_chunks, draft_roles, plan_of, release_all, role_plan, run_of, states
from piper_compiler.passes.parts import PartMaker
from piper_compiler.passes.repeat import in_microbatch, repeated
from piper_compiler.ports import BACKWARD, signatures
from piper_compiler.uniform import Uniform
from piper_ir.costs import Costs
from piper_ir.graph import Graph
from piper_ir.ops import Compute
from piper_ir.plan import CATEGORIES, COMPUTE, Category, Instr, Part, Plan, RolePlan, State, Values, part_peak
from piper_ir.program import Chunk, Program, Step
from piper_ir.timing import Prepared, with_waits

Dying = tuple[tuple[int, ...], ...]
"""Per part of an instruction, the values that die after it, by their places in `_OutlineMaker.names`."""


LATER: Mapping[str, tuple[Step, ...]] = {"F": BACKWARD, "I": ("W",), "W": ()}
"""The steps of a chunk that follow one of them."""


def alike(program: Program) -> bool:
    """Whether the nodes that complete the graph of a program are the same for any number of microbatches: there is no sum of
    loss weights and no buffer that microbatches update in order."""
    return program.loss_kind == "mean" and not any(o.kind == "buffer" for c in program.chunks for o in c.outputs)


@dataclass(frozen=True)
class Outline:
    """`plan`: for its times and peaks alone; `prepared`: what `prepare` makes of it."""

    plan: Plan
    prepared: Prepared


def outline(uniform: Uniform, graph: Graph, rows: int, training: Training, options: Options, costs: Costs | None) -> Outline:
    """The outline of the plan of a uniform graph. `graph`: the complete graph of its microbatch 0."""
    one = dependencies(graph)
    chunks = bound_chunks(graph, rows)
    count = uniform.microbatches
    seconds = InstructionSeconds(chunks.values(), costs)
    maker = _OutlineMaker(graph, one, PartMaker(graph, chunks, rows, count * graph.replicas, seconds), count)
    drafts = draft_roles(graph, repeated(uniform, one), chunks, rows, maker, options, costs)
    plan = plan_of(graph, chunks, rows, count, training, options)
    held = states(graph, training)
    kinds = iter(maker.used)
    timed = run_of(graph, drafts)
    roles, waits = [], []
    for draft, freed in zip(drafts, release_all(drafts, timed), strict=True):
        mine = [next(kinds) for _ in draft.streams]
        roles.append(_role(graph, plan, _Run(draft, freed, mine, maker), held[draft.role]))
        waits.append(draft.final_waits(freed))
    prepared = with_waits(timed[0], [draft.issue_order() for draft in drafts], waits)
    return Outline(replace(plan, roles=tuple(roles), values=Values(maker.maker.kinds)), prepared)


@dataclass(frozen=True)
class _Run:
    """The instructions of a role, with their `kinds`."""

    draft: RoleDraft[int]
    freed: Releases[int]
    kinds: list[_Kind]
    maker: _OutlineMaker


def _role(graph: Graph, plan: Plan, run: _Run, held: tuple[State, ...]) -> RolePlan:
    """One role, with its peak: a walk over its instructions as `piper_ir.memory` does it."""
    draft, freed, maker, kinds = run.draft, run.freed, run.maker, run.kinds
    memory = _Memory(maker, held, draft.allocs_first)
    nothing: tuple[int, ...] = ()
    frees, before, after, count = freed.frees, freed.before, draft.allocs_after, maker.count
    q = 0
    for k, (kind, channel) in enumerate(zip(kinds, draft.channels, strict=True)):
        if channel:
            q += 1
            continue
        end = q + len(kind.instr.parts)
        dying: Dying = tuple([tuple([v // count for v in frees[p]]) if p in frees else nothing for p in range(q, end)])
        q = end
        effect = kind.effects.get(dying) or kind.effect(plan, maker, dying)
        memory.run(k, before.get(k, nothing), effect, after.get(k, nothing))
    at = max(memory.at, 0)
    program = [kind.instr for kind in kinds]
    mb = draft.parts[at][0][2]
    if mb > 0:  # messages name it
        parts = [replace(p, node=in_microbatch(p.node, mb)) for p in program[at].parts]
        program[at] = replace(program[at], parts=tuple(parts))
    first = tuple([maker.name(v) for v in draft.allocs_first])
    role = role_plan(graph, draft.role, tuple(program), held, first)
    return replace(role, peak_bytes=memory.peak, peak_at=at, peak_by_category=memory.by_category(run))


@dataclass(frozen=True, slots=True)
class _Effect:
    """What an instruction does to the memory of its role: most bytes above those before, bytes more afterwards, the latter by
    category. The former are `fullest` less the first `gone` bytes of what dies in part `part`."""

    most: int
    more: int
    after: Mapping[Category, int]
    fullest: Mapping[Category, int]
    gone: int
    part: int


class _Memory:
    """The bytes of a role, instruction by instruction, and its first fullest moment: in instruction `at`, -1 for its start."""

    def __init__(self, maker: _OutlineMaker, held: tuple[State, ...], first: list[int]) -> None:
        self.maker, self.held, self.first = maker, held, first
        self.total = self.peak = sum(s.nbytes for s in held) + sum([maker.nbytes(v) for v in first])
        self.at = -1
        self.steps: list[tuple[Sequence[int], _Effect, Sequence[int]]] = []
        self.until = 0
        self.inside = False

    def run(self, k: int, before: Sequence[int], effect: _Effect, after: Sequence[int]) -> None:
        """`before`, `after`: values freed before it and allocated after it."""
        self.steps.append((before, effect, after))
        if before:
            self.total -= sum([self.maker.nbytes(v) for v in before])
        fullest = self.total + effect.most
        self.total += effect.more
        if after:
            self.total += sum([self.maker.nbytes(v) for v in after])
        if fullest > self.peak or self.total > self.peak:
            self.peak, self.at, self.until = max(fullest, self.total), k, len(self.steps)
            self.inside = fullest >= self.total

    def by_category(self, run: _Run) -> dict[str, int]:
        """The split of the peak."""
        held: Counter[Category] = Counter()
        for state in self.held:
            held[state.category] += state.nbytes
        self._count(held, self.first, 1)
        steps = self.steps[: self.until]
        last = steps.pop() if self.inside else None
        times = Counter([id(effect) for _, effect, _ in steps])
        for effect in {id(effect): effect for _, effect, _ in steps}.values():
            for category, nbytes in effect.after.items():
                held[category] += times[id(effect)] * nbytes
        for before, _, after in steps:
            self._count(held, before, -1)
            self._count(held, after, 1)
        if last is not None:
            self._count(held, last[0], -1)
            held.update(last[1].fullest)
            if last[1].gone:
                held.subtract(self._early(last[1].gone, _freed(run, self.at, last[1].part)))
        return {c: held[c] for c in CATEGORIES if held[c]}

    def _early(self, gone: int, freed: list[str]) -> Counter[Category]:
        """By category, the first `gone` bytes of what a part frees, as `piper_ir.memory` tells them."""
        out: Counter[Category] = Counter()
        for v in freed:
            early = min(gone, self.maker.maker.nbytes(v))
            out[self.maker.maker.kinds[v][1]] += early
            gone -= early
        return out

    def _count(self, held: Counter[Category], values: Sequence[int], sign: int) -> None:
        for v in values:
            held[self.maker.maker.kinds[self.maker.name(v)][1]] += sign * self.maker.nbytes(v)


def _freed(run: _Run, at: int, part: int) -> list[str]:
    """What dies in a part of instruction `at`, a chunk's step, as the plan lists it (see `releases`): first what is sent, then by
    its first use; by the names in microbatch 0."""
    draft, maker = run.draft, run.maker
    mb = draft.parts[at][part][2]
    q = sum([len(kind.parts) for kind in run.kinds[:at]]) + part
    sent = {v for stream, parts in zip(draft.streams, draft.parts, strict=True) if stream != COMPUTE for v in parts[0][3]}
    shared = run.freed.frees.get(q, ())
    first: dict[str, int] = {}
    for stream, parts, kind in zip(draft.streams[: at + 1], draft.parts, run.kinds, strict=False):
        if stream == COMPUTE and parts[0][2] == mb:
            for v in [v for p in kind.parts for v in (*p.writes, *p.reads)]:
                first.setdefault(v, len(first))
    others = [*run.kinds[at].inside[part], *[maker.name(v) for v in shared if v not in sent]]
    return [*[maker.name(v) for v in shared if v in sent], *sorted(others, key=first.__getitem__)]


@dataclass(slots=True)
class _Kind:
    """The instructions that differ in their microbatch only. `instr`: of microbatch 0; `seconds`: of each; `drafts`: by
    microbatch, with the node of microbatch 0 and the values alone that another node may read; `inside`: per part the other
    values that die after it."""

    instr: Instr
    seconds: float
    drafts: list[list[DraftPart[int]]]
    inside: list[tuple[str, ...]]
    effects: dict[Dying, _Effect] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.instr.parts

    def effect(self, plan: Plan, maker: _OutlineMaker, dying: Dying) -> _Effect:
        """What such an instruction does to memory, given the values that die in it."""
        most = more = gone = at = 0
        live: Counter[Category] = Counter()
        fullest: dict[Category, int] = {}
        for k, (part, inside, also) in enumerate(zip(self.parts, self.inside, dying, strict=True)):
            nbytes = {v: maker.maker.nbytes(v) for v in (*part.reads, *part.writes)}
            frees = (*inside, *[maker.names[place] for place in also])
            held = more + part_peak(plan, replace(part, frees=frees), nbytes)
            for v in part.writes:
                live[maker.maker.kinds[v][1]] += nbytes[v]
            more += sum(nbytes[v] for v in part.writes)
            if held > most:
                # Less than its writes: at its fullest moment some of the inputs that die here were gone already.
                most, gone, at = held, max(0, more - held), k
                fullest = {**live, "workspace": max(0, held - more)}
            for v in frees:
                live[maker.maker.kinds[v][1]] -= nbytes[v]
            more -= sum(nbytes[v] for v in frees)
        known = self.effects[dying] = _Effect(most, more, dict(live), fullest, gone, at)
        return known


class _OutlineMaker:
    """Makes parts for the first microbatch of each kind of instruction. `used`: the kinds of the instructions made, in order;
    `names`: values in microbatch 0, `sizes`: their bytes. The value of place p there is p * count + microbatch."""

    def __init__(self, graph: Graph, one: Dependencies, maker: PartMaker, count: int) -> None:
        self.graph, self.one, self.maker, self.count = graph, one, maker, count
        self.used: list[_Kind] = []
        self.names: list[str] = []
        self.sizes: list[int] = []
        self._places: dict[str, int] = {}
        self._drafts: dict[str, list[DraftPart[int]]] = {}
        self._tasks: dict[tuple[int, ...], tuple[tuple[str, ...], dict[tuple[str, ...], _Kind]]] = {}
        self._transfers: dict[int, _Kind] = {}
        self._loaded: set[tuple[str, int]] = set()

    def name(self, value: int) -> str:
        """In microbatch 0."""
        return self.names[value // self.count]

    def nbytes(self, value: int) -> int:
        return self.sizes[value // self.count]

    def task(self, deps: Dependencies, task: Task) -> tuple[list[DraftPart[int]], float]:
        mb, like = deps.mb[task[0]], tuple([deps.of[i] for i in task])
        known = self._tasks.get(like)
        if known is None:
            known = self._tasks[like] = self._sources_of(like), {}
        sources, kinds = known
        fresh: tuple[str, ...] = ()
        if sources:
            fresh = tuple([v for v in sources if (v, mb) not in self._loaded])
            self._loaded.update([(v, mb) for v in fresh])
        kind = kinds.get(fresh)
        if kind is None:
            for v in fresh:  # another kind may have loaded it for its microbatch 0
                self.maker.kinds.pop(v, None)
            kind = kinds[fresh] = self._kind(COMPUTE, *self.maker.task(self.one, list(like)))
        self.used.append(kind)
        return kind.drafts[mb], kind.seconds

    def comm(self, deps: Dependencies, i: int) -> tuple[list[DraftPart[int]], float]:
        k = deps.of[i]
        kind = self._transfers.get(k)
        if kind is None:
            kind = self._transfers[k] = self._kind(self.one.nodes[k].stream, *self.maker.comm(self.one, k))
        self.used.append(kind)
        return kind.drafts[deps.mb[i]], kind.seconds

    def _sources_of(self, nodes: tuple[int, ...]) -> tuple[str, ...]:
        """The batch tensors and gradients of the loss that nodes read, as they are called on their role."""
        read = [(v, self.one.nodes[k].role) for k in nodes for v in self.one.nodes[k].reads]
        return tuple(dict.fromkeys([f"{v}#{role}" for v, role in read if v not in self.graph.writer]))

    def _kind(self, stream: str, drafts: list[DraftPart[str]], seconds: float) -> _Kind:
        parts = tuple([Part(*draft) for draft in drafts])
        made = {v for p in parts if not isinstance(p.op, Compute) for v in p.writes}
        shared = self.graph.values.keys() | made | self._places.keys()
        for p in parts:
            if p.node not in self._drafts:
                reads, writes = (self._by_microbatch([v for v in vs if v in shared], p.mb) for vs in (p.reads, p.writes))
                n, mbs = len(reads), [-1] if p.mb < 0 else range(self.count)
                self._drafts[p.node] = list(zip(repeat(p.node, n), repeat(p.op, n), mbs, reads, writes, strict=True))
        inside = [tuple([v for v in _dies_in(p, self.maker.chunks) if v not in shared]) for p in parts]
        named = [list(row) for row in zip(*[self._drafts[p.node] for p in parts], strict=True)]
        return _Kind(Instr(stream, parts), seconds, named, inside)

    def _by_microbatch(self, values: list[str], mb: int) -> list[tuple[int, ...]]:
        """Some values in each microbatch; only once for those of the whole step."""
        n = 1 if mb < 0 else self.count
        firsts = [self.count * self._place(v) for v in values]
        return list(zip(*[range(first, first + n) for first in firsts], strict=True)) if firsts else [()] * n

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
