"""Keep a role's program as a table of few templates.

For each instruction the table has its template and microbatch. Microbatches are alike, so a program repeats nearly the
same instructions many times. The table keeps each once, and makes an `Instr` with names when it is asked for. Values
are numbers: value v of microbatch mb is number `v * count + mb`, one of the whole step `v * count`.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeVar, overload

from piper_ir.ground.node_ids import named
from piper_ir.ground.sizes import TensorSpec, bind
from piper_ir.plan.instructions import HOST, Category, Instr, Part
from piper_ir.program.ops import COMM, Op
from piper_ir.tools import no_garbage_collection

T = TypeVar("T")
Kinds = Mapping[str, tuple[TensorSpec, Category]]
"""The size and category of each value, by its name."""
_ValuesByInstr = Mapping[int, tuple[int, ...]]
"""The values by the instruction that frees or makes them."""


@dataclass(frozen=True)
class ValueTable:
    """Hold the values of a plan, each for all microbatches.

    Attributes:
        ids: by value, its id.
        tails: by value, the end of its name after the microbatch.
        kinds: by value, size and category.
        whole: by value, whether it belongs to the whole step.
        count: how many microbatches.
    """

    ids: tuple[str, ...]
    tails: tuple[str, ...]
    kinds: tuple[tuple[TensorSpec, Category], ...]
    whole: tuple[bool, ...]
    count: int

    @staticmethod
    def of(kinds: Kinds) -> ValueTable:
        """Return a table in which each name is a value of its own, of the whole step."""
        n = len(kinds)
        values = ValueTable(tuple(kinds), ("",) * n, tuple(kinds.values()), (True,) * n, 1)
        values.known.update(zip(kinds, range(n), strict=True))
        return values

    @cached_property
    def nbytes(self) -> tuple[int, ...]:
        """Return the bytes of each value in one microbatch."""
        known: dict[int, int] = {}
        return tuple(
            [known.get(id(s)) or known.setdefault(id(s), bind(s.nbytes, 0)) for s, _ in self.kinds]
        )

    @cached_property
    def device_nbytes(self) -> tuple[int, ...]:
        """Return the bytes of each value in one microbatch, 0 for one in the memory of the host."""
        kinds = zip(self.nbytes, self.kinds, strict=True)
        return tuple([0 if category == HOST else nbytes for nbytes, (_, category) in kinds])

    @cached_property
    def on_host(self) -> bool:
        """Return whether a value is in the memory of the host."""
        return any(category == HOST for _, category in self.kinds)

    @cached_property
    def names(self) -> list[str]:
        """Return the name of each number."""
        all_names: list[str] = []
        for id, tail, whole in zip(self.ids, self.tails, self.whole, strict=True):
            all_names += (
                [id] * self.count if whole else [named(id, tail, mb) for mb in range(self.count)]
            )
        return all_names

    @cached_property
    def known(self) -> dict[str, int]:
        """Return the numbers of the names that `name` has given."""
        return {}

    def name(self, number: int) -> str:
        """Return the name of one number, without making all of them."""
        if "names" in self.__dict__:
            return self.names[number]
        v, mb = divmod(number, self.count)
        text = self.ids[v] if self.whole[v] else named(self.ids[v], self.tails[v], mb)
        self.known[text] = number
        return text

    def __getstate__(self) -> dict[str, Any]:
        kept = ("ids", "tails", "kinds", "whole", "count")
        return {name: self.__dict__[name] for name in kept}


@dataclass(frozen=True, slots=True)
class PartTemplate:
    """Hold a part in any microbatch: `Part` with numbers of values in place of names.

    The numbers hold for an instruction in microbatch 0; a value of the whole step has the same number in all
    microbatches. `ahead` is the part's microbatch relative to the instruction's, for an instruction that joins several.
    The tail is None if `node` is the whole name in every microbatch.
    """

    node: str
    tail: str | None
    op: Op
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...] = ()
    ahead: int = 0
    held: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class InstrTemplate:
    """Hold an instruction in any microbatch, without its waits and the values that it frees or makes for communication.

    These differ between microbatches. `kind` is the same for templates of a role that differ in their frees only.
    """

    stream: str
    parts: tuple[PartTemplate, ...]
    seconds: float | None = None
    kind: int = 0

    @property
    def channel(self) -> str:
        """Return the channel that it uses; "" for compute."""
        op = self.parts[0].op if self.parts else None
        return op.channel if isinstance(op, COMM) else ""

    def on_channel(self, name: str) -> InstrTemplate:
        """Return a communication on a channel of another name."""
        part = self.parts[0]
        assert isinstance(part.op, COMM)
        return replace(self, parts=(replace(part, op=replace(part.op, channel=name)),))


class InstrTable(Sequence[Instr]):
    """Hold the program of a role.

    Instruction i is template `used[i]` in microbatch `mbs[i]` (-1: of the whole step). It waits for the instructions
    `waits[i]`, frees `early[i]` before it runs and makes `made[i]` afterwards. The values `first` are there from the
    start. The numbers in `waits` from the length of the program on are those of `astray`: waits, as (stream, n), that
    lead to no instruction of the role, which the verifier refuses (R05).
    """

    def __init__(
        self,
        values: ValueTable,
        templates: Sequence[InstrTemplate],
        used: Sequence[int],
        mbs: Sequence[int],
        waits: Sequence[tuple[int, ...]],
        early: _ValuesByInstr,
        made: _ValuesByInstr,
        first: tuple[int, ...] = (),
        astray: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.values, self.templates, self.used, self.mbs = values, templates, used, mbs
        self.waits, self.early, self.made, self.first = waits, early, made, first
        self.astray = tuple(astray)
        self._instrs: list[Instr | None] = [None] * len(used)

    @classmethod
    def of(cls, instrs: Sequence[Instr], values: ValueTable, first: Sequence[str]) -> InstrTable:
        """Return instructions as a table in which each has a template of its own.

        `values` has all of their names, each as a value of the whole step.
        """

        def numbers(names: Sequence[str]) -> tuple[int, ...]:
            return tuple([values.known[name] for name in names])

        counts: dict[str, int] = {}
        at: dict[tuple[str, int], int] = {}
        for i, instr in enumerate(instrs):
            counts[instr.stream] = counts.get(instr.stream, 0) + 1
            at[instr.stream, counts[instr.stream]] = i
        templates, waits = [], []
        for i, instr in enumerate(instrs):
            parts = [
                PartTemplate(
                    p.node, None, p.op, numbers(p.reads), numbers(p.writes), numbers(p.frees), p.mb + 1, numbers(p.held)
                )
                for p in instr.parts
            ]  # fmt: skip
            templates.append(InstrTemplate(instr.stream, tuple(parts), instr.seconds, i))
            waits.append(tuple([at.setdefault(wait, len(at)) for wait in instr.waits]))
        early = {i: numbers(x.frees_before) for i, x in enumerate(instrs) if x.frees_before}
        allocated = {i: numbers(x.allocs_after) for i, x in enumerate(instrs) if x.allocs_after}
        n = len(instrs)
        columns = range(n), [-1] * n, waits, early, allocated, numbers(first), tuple(at)[n:]
        table = cls(values, templates, *columns)
        table.all = tuple(instrs)
        return table

    def on_channels(self, names: Mapping[str, str]) -> InstrTable:
        """Return the program with other names of channels.

        Instructions that compute stay the same objects, by which costs are found.
        """
        templates = [
            t.on_channel(names[t.channel]) if t.channel in names else t for t in self.templates
        ]
        columns = self.waits, self.early, self.made, self.first, self.astray
        renamed = InstrTable(self.values, templates, self.used, self.mbs, *columns)
        renamed._instrs = [
            None if templates[k].channel else instr
            for k, instr in zip(self.used, self.all, strict=True)
        ]
        return renamed

    def __len__(self) -> int:
        return len(self.used)

    @overload
    def __getitem__(self, i: int) -> Instr: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[Instr, ...]: ...
    def __getitem__(self, i: int | slice) -> Instr | tuple[Instr, ...]:
        if "all" in self.__dict__:
            return self.all[i]
        if isinstance(i, slice):
            return tuple([self[k] for k in range(*i.indices(len(self)))])
        instr = self._instrs[i]
        if instr is None:
            instr = self._instrs[i] = self._instr(i % len(self), self.values.name)
        return instr

    def __iter__(self) -> Iterator[Instr]:
        return iter(self.all)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as a list: roles are not hashed

    def __repr__(self) -> str:
        return repr(tuple(self))

    @cached_property
    def all(self) -> tuple[Instr, ...]:
        """Return every instruction."""
        with no_garbage_collection():  # they are many, and in no cycle
            name = self.values.names.__getitem__
            return tuple([instr or self._instr(i, name) for i, instr in enumerate(self._instrs)])

    @property
    def ops(self) -> list[Op]:
        """Return the ops of the templates in use."""
        return [p.op for k in sorted(set(self.used)) for p in self.templates[k].parts]

    @property
    def streams(self) -> list[str]:
        """Return the stream of each instruction."""
        names = [t.stream for t in self.templates]
        return [names[k] for k in self.used]

    @property
    def channels(self) -> list[str]:
        """Return the channel that each instruction uses; "" for compute."""
        names = [t.channel for t in self.templates]
        return [names[k] for k in self.used]

    def each(self, fact: Callable[[Instr], T]) -> list[T]:
        """Return a fact about each instruction, computed once for all with equal ops on values of equal sizes.

        It is computed from an instruction without waits.
        """
        known: dict[int, T] = {}
        numbers: dict[object, int] = {}
        by_kind: dict[int, int] = {}
        for t in self.templates:
            if t.kind not in by_kind:
                by_kind[t.kind] = numbers.setdefault(self._work(t), len(numbers))
        kinds = [by_kind[t.kind] for t in self.templates]
        used = [kinds[k] for k in self.used]
        for i, kind in enumerate(used):
            if kind not in known:
                known[kind] = fact(self._bare(i, self.values.name))
        return [known[kind] for kind in used]

    def _work(self, template: InstrTemplate) -> object:
        """Return the ops of an instruction with the sizes of its values, without their names."""
        sizes, count = self.values.nbytes, self.values.count
        parts = [
            (
                p.op,
                tuple([sizes[v // count] for v in p.reads]),
                tuple([sizes[v // count] for v in p.writes]),
            )
            for p in template.parts
        ]
        return template.stream, template.seconds, tuple(parts)

    @cached_property
    def places(self) -> list[tuple[str, int]]:
        """Return for each number in `waits` the stream, and the count on it up to the instruction waited for."""
        counts: dict[str, int] = {}
        places = []
        for stream in self.streams:
            counts[stream] = counts.get(stream, 0) + 1
            places.append((stream, counts[stream]))
        return [*places, *self.astray]

    def _instr(self, i: int, name: Callable[[int], str]) -> Instr:
        """Return instruction i with its waits."""
        stream, parts, seconds = self._said(i, name)
        own = self.waits[i]
        waits = tuple([self.places[j] for j in own]) if own else ()
        early = tuple([name(v) for v in self.early[i]]) if i in self.early else ()
        allocated = tuple([name(v) for v in self.made[i]]) if i in self.made else ()
        return Instr(stream, parts, waits, early, allocated, seconds)

    def _bare(self, i: int, name: Callable[[int], str]) -> Instr:
        """Return an instruction with the fields that all instructions of its template share."""
        stream, parts, seconds = self._said(i, name)
        return Instr(stream, parts, seconds=seconds)

    def _said(
        self, i: int, name: Callable[[int], str]
    ) -> tuple[str, tuple[Part, ...], float | None]:
        """Return the stream, parts and duration that follow from an instruction's template and microbatch."""
        template, mb = self.templates[self.used[i]], self.mbs[i]
        shift = mb if mb > 0 else 0
        parts = []
        for p in template.parts:
            own = mb + p.ahead
            reads, writes, frees = p.reads, p.writes, p.frees
            parts.append(
                Part(
                    named(p.node, p.tail, own),
                    p.op,
                    own,
                    tuple([name(v + shift) for v in reads]) if reads else (),
                    tuple([name(v + shift) for v in writes]) if writes else (),
                    tuple([name(v + shift) for v in frees]) if frees else (),
                    tuple([name(v + shift) for v in p.held]) if p.held else (),
                )
            )
        return template.stream, tuple(parts), template.seconds

    @property
    def alike(self) -> list[int]:
        """Return a number for each instruction, equal for instructions that differ only in their microbatch.

        They have one template, and the template's values in other microbatches. An instruction without a microbatch, or
        whose microbatch leads beyond the values of the table, is alike to none.
        """
        room = [self._room(t) for t in self.templates]
        return [
            k if 0 <= mb < room[k] else -1 - i
            for i, (k, mb) in enumerate(zip(self.used, self.mbs, strict=True))
        ]

    def _room(self, template: InstrTemplate) -> int:
        """Return how many microbatches a template has values for."""
        count = self.values.count
        values = [
            v % count for p in template.parts for v in (*p.reads, *p.writes, *p.frees, *p.held)
        ]
        return count - max([*values, *[p.ahead for p in template.parts]], default=0)

    def written(self) -> Iterator[int]:
        """Yield the numbers of the values that are written, in program order."""
        writes = [[v for p in t.parts for v in p.writes] for t in self.templates]
        for k, mb in zip(self.used, self.mbs, strict=True):
            shift = mb if mb > 0 else 0
            for v in writes[k]:
                yield v + shift

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle columns by their differences, which are small because columns change evenly."""
        back = [[i - j for j in waits] for i, waits in enumerate(self.waits)]
        columns = [
            self.used,
            self.mbs,
            *_flat(back),
            *self._packed(self.early),
            *self._packed(self.made),
        ]
        return _unpacked, (
            self.values,
            tuple(self.templates),
            [_pack(c) for c in columns],
            self.first,
            self.astray,
        )

    def _packed(self, numbers: _ValuesByInstr) -> list[Iterable[int]]:
        """Return instructions, the number of values of each, the values, and their microbatches (relative)."""
        count = self.values.count
        flat = [(v // count, v % count - self.mbs[i]) for i, vs in numbers.items() for v in vs]
        return [
            numbers.keys(),
            [len(vs) for vs in numbers.values()],
            [v for v, _ in flat],
            [mb for _, mb in flat],
        ]


def _flat(lists: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    return [len(x) for x in lists], [n for x in lists for n in x]


def _pack(column: Iterable[int]) -> bytes:
    return zlib.compress(array("i", column).tobytes(), 6)


def _unpack(column: bytes) -> list[int]:
    numbers = array("i")
    numbers.frombytes(zlib.decompress(column))
    return numbers.tolist()


def _unpacked(
    values: ValueTable,
    templates: tuple[InstrTemplate, ...],
    columns: list[bytes],
    first: tuple[int, ...],
    astray: tuple[tuple[str, int], ...] = (),
) -> InstrTable:
    used, mbs, many, back, *rest = map(_unpack, columns)
    waits = [
        tuple([i - n for n in back[a:b]])
        for i, (a, b) in enumerate(pairwise(accumulate(many, initial=0)))
    ]
    early, allocated = (_numbers(values.count, mbs, *rest[k : k + 4]) for k in (0, 4))
    return InstrTable(values, templates, used, mbs, waits, early, allocated, first, astray)


def _numbers(
    count: int,
    own: list[int],
    instrs: list[int],
    many: list[int],
    places: list[int],
    mbs: list[int],
) -> _ValuesByInstr:
    values_by_instr = {}
    for i, (a, b) in zip(instrs, pairwise(accumulate(many, initial=0)), strict=True):
        values_by_instr[i] = tuple(
            [v * count + mb + own[i] for v, mb in zip(places[a:b], mbs[a:b], strict=True)]
        )
    return values_by_instr
