"""Compute the memory of a plan in program order: a stream of allocations and frees, and folds over it.

`Plan` defines the rules, and `part_peak` the peak of a part while it runs. `memory_steps.steps` is the stream. The
peak, the curve (`scan`), the owners at the peak (`memory_owners`) and a snapshot of the allocator
(`piper_simulator.memory.snapshot`) fold over it. An `Effect` is the effect of an instruction on memory; each template
has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Generic, TypeVar

from piper_ir.fold.memory_steps import Kinds, PartUse, PartUses
from piper_ir.fold.part_memory import PartLike
from piper_ir.ground.errors import PlanError
from piper_ir.plan.instr_table import InstrTable, TableKinds
from piper_ir.plan.plan import CATEGORIES, COMPUTE, Category, DeviceType, Instr, Plan, RolePlan

V = TypeVar("V")
"""A value by name, or by number in a table."""
BytesByCategory = Mapping[Category, int]
"""The bytes of each category."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Say how many bytes instruction `instr` of a role holds at most, in all and by category without empty ones."""

    instr: int
    total: int
    bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Effect:
    """Hold an instruction's effect on memory, in bytes above those before it: `most` at its peak, `more` after it.

    `fullest` and `after` hold these bytes by category.
    """

    most: int
    fullest: BytesByCategory
    more: int
    after: BytesByCategory


@dataclass(frozen=True, slots=True)
class _Change(Generic[V]):
    """Hold a step as bytes: its frees before, its effect, and its allocations afterwards."""

    index: int
    effect: Effect
    early: Sequence[V] = ()
    freed: int = 0
    made: Sequence[V] = ()
    more: int = 0


def scan(plan: Plan, role: RolePlan) -> Iterator[Usage]:
    """Yield the fullest moment of each instruction of the stream "compute", in program order.

    It needs no peak fields; time is linear in the role's values. Raises PlanError for a free of a value that is not
    alive.
    """
    yield from _walk(plan, role, PartUses(plan)).curve()


def peak(plan: Plan, role: RolePlan) -> Usage:
    """Return the first fullest moment of a role; one that computes nothing holds its initial bytes."""
    return _walk(plan, role, PartUses(plan)).peak()


def peaks_by_names(plan: Plan, kinds: Kinds) -> list[Usage]:
    """Return the peak of each role from its instructions, value by value, whatever tables they may be made of.

    The verifier asks this: it must not rest on the tables that it judges.
    """
    uses = PartUses(plan, kinds)
    return [_NamedWalk(role, uses).peak() for role in plan.roles]


def _fullest(start: int, steps: Iterable[tuple[int, int, int]]) -> int:
    """Return the first instruction that reaches the peak; -1 when none holds more than the initial bytes."""
    at, most, total = -1, start, start
    for index, inside, after in steps:
        held = total + (inside if inside > after else after)
        total += after
        if held > most:
            at, most = index, held
    return at


def with_peaks(plan: Plan) -> Plan:
    """Return the plan with `peak_bytes`, `peak_at` and `peak_by_category` of every role filled in."""
    roles = []
    uses = PartUses(plan)
    for role in plan.roles:
        most = _walk(plan, role, uses).peak()
        roles.append(
            replace(role, peak_bytes=most.total, peak_at=most.instr, peak_by_category=most.bytes)
        )
    return replace(plan, roles=tuple(roles))


def on_device(plan: Plan, device: DeviceType) -> Plan:
    """Return the plan with its peaks on a kind of device."""
    return plan if plan.device == device else with_peaks(replace(plan, device=device))


class _Walk(Generic[V]):
    """Walk the memory of a role through its program; `first` are the values that exist from the start."""

    def __init__(self, role: RolePlan, uses: PartUses) -> None:
        self.role, self.uses = role, uses

    def changes(self) -> Iterator[_Change[V]]:
        raise NotImplementedError

    def size(self, value: V) -> int:
        raise NotImplementedError

    def category(self, value: V) -> Category:
        raise NotImplementedError

    def first(self) -> Iterable[V]:
        raise NotImplementedError

    def start(self) -> Counter[Category]:
        """Return the bytes held before the first instruction."""
        live: Counter[Category] = Counter()
        for state in self.role.states:
            live[state.category] += state.nbytes
        for v in self.first():
            live[self.category(v)] += self.size(v)
        return live

    def curve(self) -> Iterator[Usage]:
        """Yield the fullest moment of each step."""
        live: dict[Category, int] = dict(self.start())
        total = sum(live.values())
        for change in self.changes():
            effect = change.effect
            for v in change.early:
                live[self.category(v)] -= self.size(v)
            total -= change.freed
            inside = (
                _together(live, effect.fullest)
                if effect.most >= effect.more + change.more
                else None
            )
            _add(live, effect.after, 1)
            for v in change.made:
                live[self.category(v)] = live.get(self.category(v), 0) + self.size(v)
            most = total + effect.most
            total += effect.more + change.more
            yield (
                Usage(change.index, total, _present(live))
                if inside is None
                else Usage(change.index, most, inside)
            )

    def peak(self) -> Usage:
        """Return the first fullest moment."""
        live = self.start()
        at = _fullest(live.total(), self.totals())
        if at < 0:
            return Usage(0, live.total(), _present(live))
        return self.usage(live, self.until(live, at))

    def totals(self) -> Iterator[tuple[int, int, int]]:
        """Yield (instruction, most while its parts run, afterwards) of each step, in bytes above those before."""
        for change in self.changes():
            yield (
                change.index,
                change.effect.most - change.freed,
                change.effect.more - change.freed + change.more,
            )

    def until(self, live: Counter[Category], at: int) -> _Change[V]:
        """Apply all changes before the one of instruction `at`, and return that one."""
        for change in self.changes():
            if change.index == at:
                return change
            self.apply(live, change)
        raise AssertionError(f"instruction {at} computes nothing")

    def effect(self, parts: Iterable[PartLike[V]]) -> Effect:
        most: int | None = None
        more = 0
        live: dict[Category, int] = {}
        fullest: BytesByCategory = {}
        size, category = self.size, self.category
        for part in parts:
            sizes = {v: size(v) for v in (*part.reads, *part.writes)}
            use = self.uses.of(part, sizes)
            for v in part.writes:
                owner = category(v)
                live[owner] = live.get(owner, 0) + sizes[v]
                more += sizes[v]
            if most is None or more + use.beside > most:
                most, fullest = more + use.beside, self._at_fullest(live, use)
            for v in part.frees:
                owner, nbytes = category(v), size(v)
                live[owner] = live.get(owner, 0) - nbytes
                more -= nbytes
        return Effect(most or 0, fullest, more, live)

    def _at_fullest(self, live: BytesByCategory, use: PartUse[PartLike[V]]) -> BytesByCategory:
        """Return the bytes by category at a part's fullest moment, with its writes allocated."""
        out = dict(live)
        if use.beside >= 0:
            return out | {"workspace": use.beside} if use.beside else out
        gone = -use.beside  # some of the inputs that die here were given back already
        for v in use.part.frees:
            early = (
                0 if v in use.part.held else min(gone, self.size(v))
            )  # held values die after the part
            out[self.category(v)] = out.get(self.category(v), 0) - early
            gone -= early
        return out

    def usage(self, live: Counter[Category], change: _Change[V]) -> Usage:
        """Return the fullest moment of a step, given the bytes held before it."""
        held = live.copy()
        for v in change.early:
            held[self.category(v)] -= self.size(v)
        before = held.total()
        if change.effect.most >= change.effect.more + change.more:
            _add(held, change.effect.fullest, 1)
            return Usage(change.index, before + change.effect.most, _present(held))
        self.apply(held := live.copy(), change)
        return Usage(change.index, held.total(), _present(held))

    def apply(self, live: Counter[Category], change: _Change[V]) -> None:
        _add(live, change.effect.after, 1)
        self.move(live, change)

    def move(self, live: Counter[Category], change: _Change[V]) -> None:
        """Apply a step to the live bytes, except its parts."""
        for v in change.early:
            live[self.category(v)] -= self.size(v)
        for v in change.made:
            live[self.category(v)] += self.size(v)


class _NamedWalk(_Walk[str]):
    """Walk any program, value by value."""

    def __init__(self, role: RolePlan, uses: PartUses) -> None:
        super().__init__(role, uses)
        self.kinds, self.nbytes = uses.kinds, uses.nbytes

    def size(self, value: str) -> int:
        return self.nbytes[value]

    def category(self, value: str) -> Category:
        return self.kinds[value][1]

    def first(self) -> Iterable[str]:
        return self.role.allocs_first

    def changes(self) -> Iterator[_Change[str]]:
        alive = set(self.role.allocs_first)
        for index, instr in enumerate(self.role.program):
            if instr.stream != COMPUTE:
                continue
            self._check(alive, index, instr)
            yield self._change(index, instr)

    def totals(self) -> Iterator[tuple[int, int, int]]:
        """Yield the numbers of `changes`, summed over the categories."""
        alive, nbytes, uses = set(self.role.allocs_first), self.nbytes, self.uses
        for index, instr in enumerate(self.role.program):
            if instr.stream != COMPUTE:
                continue
            self._check(alive, index, instr)
            more = -sum([nbytes[v] for v in instr.frees_before])
            fullest = []
            for part in instr.parts:
                fullest.append(more + uses.most(part, nbytes))
                more += sum([nbytes[v] for v in part.writes]) - sum([nbytes[v] for v in part.frees])
            yield (
                index,
                max(fullest, default=more),
                more + sum([nbytes[v] for v in instr.allocs_after]),
            )

    def until(self, live: Counter[Category], at: int) -> _Change[str]:
        program, nbytes, category = self.role.program, self.nbytes, self.category
        for instr in program[:at]:
            if instr.stream == COMPUTE:
                for v in chain(instr.frees_before, *[part.frees for part in instr.parts]):
                    live[category(v)] -= nbytes[v]
                for v in chain(instr.allocs_after, *[part.writes for part in instr.parts]):
                    live[category(v)] += nbytes[v]
        return self._change(at, program[at])

    def _change(self, index: int, instr: Instr) -> _Change[str]:
        early, made = instr.frees_before, instr.allocs_after
        freed, more = (sum([self.nbytes[v] for v in vs]) for vs in (early, made))
        return _Change(index, self.effect(instr.parts), early, freed, made, more)

    def _check(self, alive: set[str], index: int, instr: Instr) -> None:
        """Raise PlanError if an instruction frees a value that is not alive."""
        for writes, frees in [
            ((), instr.frees_before),
            *[(p.writes, p.frees) for p in instr.parts],
        ]:
            alive.update(writes)
            if not alive.issuperset(frees) or len(set(frees)) < len(frees):
                lost = next(v for v in frees if v not in alive or frees.count(v) > 1)
                text = f"frees {lost}, which is not alive there"
                raise PlanError(f"role {self.role.role}, instruction {index} {instr.name}: {text}")
            alive.difference_update(frees)
        alive.update(instr.allocs_after)


class _TableWalk(_Walk[int]):
    """Walk a program that is a table, template by template."""

    def __init__(self, role: RolePlan, uses: PartUses, table: InstrTable) -> None:
        super().__init__(role, uses)
        self.table, self.count = table, table.values.count
        self.sizes, self.kinds = table.values.nbytes, table.values.kinds
        self.effects = [
            self.effect(t.parts) if t.stream == COMPUTE else None for t in table.templates
        ]

    def size(self, value: int) -> int:
        return self.sizes[value // self.count]

    def category(self, value: int) -> Category:
        return self.kinds[value // self.count][1]

    def first(self) -> Iterable[int]:
        return self.table.first

    def changes(self) -> Iterator[_Change[int]]:
        for index, k in enumerate(self.table.used):
            effect = self.effects[k]
            if effect is not None:
                yield self._change(index, effect)

    def _change(self, index: int, effect: Effect) -> _Change[int]:
        early, made = self.table.early.get(index, ()), self.table.made.get(index, ())
        freed, more = (sum([self.size(v) for v in vs]) for vs in (early, made))
        return _Change(index, effect, early, freed, made, more)

    def totals(self) -> Iterator[tuple[int, int, int]]:
        early, made, sizes, count = self.table.early, self.table.made, self.sizes, self.count
        usual = [None if effect is None else (effect.most, effect.more) for effect in self.effects]
        for index, k in enumerate(self.table.used):
            if (known := usual[k]) is None:
                continue
            inside, after = known
            if index in early:
                freed = sum([sizes[v // count] for v in early[index]])
                inside, after = inside - freed, after - freed
            if index in made:
                after += sum([sizes[v // count] for v in made[index]])
            yield index, inside, after

    def until(self, live: Counter[Category], at: int) -> _Change[int]:
        for k, times in Counter(self.table.used[:at]).items():
            if (effect := self.effects[k]) is not None:
                _add(live, effect.after, times)
        for numbers, sign in ((self.table.early, -1), (self.table.made, 1)):
            for v in [v for index, vs in numbers.items() if index < at for v in vs]:
                live[self.category(v)] += sign * self.size(v)
        effect = self.effects[self.table.used[at]]
        assert effect is not None, f"instruction {at} computes nothing"
        return self._change(at, effect)


def _walk(plan: Plan, role: RolePlan, uses: PartUses) -> _NamedWalk | _TableWalk:
    table, kinds = role.program, plan.kinds
    if isinstance(table, InstrTable) and isinstance(kinds, TableKinds) and kinds.are_of(table):
        if role.allocs_first == tuple(map(table.values.name, table.first)):
            return _TableWalk(role, uses, table)
    return _NamedWalk(role, uses)


def _add(live: dict[Category, int], more: BytesByCategory, times: int) -> None:
    for category, nbytes in more.items():
        live[category] = live.get(category, 0) + times * nbytes


def _together(live: BytesByCategory, more: BytesByCategory) -> dict[str, int]:
    return {c: b for c in CATEGORIES if (b := live.get(c, 0) + more.get(c, 0))}


def _present(live: Mapping[Category, int]) -> dict[str, int]:
    return {c: live[c] for c in CATEGORIES if live.get(c)}
