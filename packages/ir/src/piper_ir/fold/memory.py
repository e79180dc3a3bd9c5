"""Compute the memory of a plan in program order: a stream of allocations and frees, and folds over it.

`Plan` defines the rules, and `part_peak` the peak of a part while it runs. The peak and the curve (`scan`) fold over
the program's table: an `Effect` is the effect of an instruction on memory, and each template has one. The owners at the
peak (`memory_owners`) and a snapshot of the allocator (`piper_simulator.memory.snapshot`) fold over the same changes by
name, `memory_steps.steps`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from piper_ir.fold.memory_steps import PartUse, PartUses
from piper_ir.ground.errors import PlanError
from piper_ir.plan.instr_table import PartTemplate
from piper_ir.plan.plan import CATEGORIES, COMPUTE, HOST, Category, DeviceType, Plan, RolePlan
from piper_ir.program.ops import Op, Update

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
class _Change:
    """Hold a step as bytes: its frees before, its effect, and its allocations afterwards."""

    index: int
    effect: Effect
    early: Sequence[int] = ()
    freed: int = 0
    made: Sequence[int] = ()
    more: int = 0


def scan(plan: Plan, role: RolePlan) -> Iterator[Usage]:
    """Yield the fullest moment of each instruction of the stream "compute", in program order.

    It needs no peak fields; time is linear in the role's values. Raises PlanError for a free of a value that is not
    alive.
    """
    yield from RoleMemory(plan, role).curve()


def peak(plan: Plan, role: RolePlan, uses: PartUses | None = None) -> Usage:
    """Return the first fullest moment of a role; one that computes nothing holds its initial bytes."""
    return RoleMemory(plan, role, uses).peak()


def host_peak(role: RolePlan) -> int:
    """Return the most bytes that a role has in the memory of the host, in program order."""
    table, values = role.table, role.table.values
    start = sum([s.nbytes for s in role.states if s.host])
    waiting = values.on_host
    if not start and not waiting:
        return 0
    inside = [sum([_beside_on_host(p.op) for p in t.parts]) for t in table.templates]
    if not waiting:
        return start + max([inside[k] for k in set(table.used)], default=0)
    size = [n if c == HOST else 0 for n, (_, c) in zip(values.nbytes, values.kinds, strict=True)]
    count, live, most = values.count, start, start
    dying = [sum([size[v // count] for p in t.parts for v in p.frees]) for t in table.templates]
    for index, k in enumerate(table.used):
        live -= sum([size[v // count] for v in table.early.get(index, ())]) + dying[k]
        live += sum([size[v // count] for v in table.made.get(index, ())])
        most = max(most, live + inside[k])
    return most


def _beside_on_host(op: Op) -> int:
    return op.host_workspace if isinstance(op, Update) else 0


def _fullest(start: int, steps: Iterable[tuple[int, int, int]]) -> int:
    """Return the first instruction that reaches the peak; -1 when none holds more than the initial bytes."""
    at, most, total = -1, start, start
    for index, inside, after in steps:
        nbytes = total + (inside if inside > after else after)
        total += after
        if nbytes > most:
            at, most = index, nbytes
    return at


def with_peaks(plan: Plan) -> Plan:
    """Return the plan with the fields of every role filled in that begin with `peak` and `host_peak`."""
    roles = []
    uses = PartUses(plan)
    for role in plan.roles:
        most = RoleMemory(plan, role, uses).peak()
        counted = replace(role, peak_bytes=most.total, peak_at=most.instr)
        roles.append(replace(counted, peak_by_category=most.bytes, host_peak_bytes=host_peak(role)))
    return replace(plan, roles=tuple(roles))


def on_device(plan: Plan, device: DeviceType) -> Plan:
    """Return the plan with its peaks on a kind of device."""
    return plan if plan.device == device else with_peaks(replace(plan, device=device))


class RoleMemory:
    """Walk the memory of a role through its program, template by template; values are numbers of its table."""

    def __init__(self, plan: Plan, role: RolePlan, uses: PartUses | None = None) -> None:
        """Prepare; `uses`, if given, are known from another role of the plan."""
        self.role, self.uses, self.table = role, uses or PartUses(plan), role.table
        values = self.table.values
        self.count, self.kinds = values.count, values.kinds
        self.sizes = values.device_nbytes
        self.effects = [
            self.effect(t.parts) if t.stream == COMPUTE else None for t in self.table.templates
        ]
        if plan.kinds.given is not None:  # compiled programs free nothing twice
            _check_frees(role)

    def size(self, value: int) -> int:
        return self.sizes[value // self.count]

    def category(self, value: int) -> Category:
        return self.kinds[value // self.count][1]

    def start(self) -> Counter[Category]:
        """Return the bytes held before the first instruction."""
        live: Counter[Category] = Counter()
        for state in self.role.device_states:
            live[state.category] += state.nbytes
        for v in self.table.first:
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

    def moments(self) -> Iterator[tuple[int, int]]:
        """Yield the instruction and the bytes of each moment of `curve`, which costs less without categories."""
        total = self.start().total()
        for index, inside, after in self.totals():
            yield index, total + (inside if inside > after else after)
            total += after

    def at(self, index: int) -> Usage:
        """Return the moment of an instruction."""
        live = self.start()
        return self.usage(live, self.until(live, index))

    def changes(self) -> Iterator[_Change]:
        for index, k in enumerate(self.table.used):
            effect = self.effects[k]
            if effect is not None:
                yield self._change(index, effect)

    def _change(self, index: int, effect: Effect) -> _Change:
        early, allocated = self.table.early.get(index, ()), self.table.made.get(index, ())
        freed, more = (sum([self.size(v) for v in vs]) for vs in (early, allocated))
        return _Change(index, effect, early, freed, allocated, more)

    def totals(self) -> Iterator[tuple[int, int, int]]:
        early, allocated, sizes, count = self.table.early, self.table.made, self.sizes, self.count
        usual = [None if effect is None else (effect.most, effect.more) for effect in self.effects]
        for index, k in enumerate(self.table.used):
            if (known := usual[k]) is None:
                continue
            inside, after = known
            if index in early:
                freed = sum([sizes[v // count] for v in early[index]])
                inside, after = inside - freed, after - freed
            if index in allocated:
                after += sum([sizes[v // count] for v in allocated[index]])
            yield index, inside, after

    def until(self, live: Counter[Category], at: int) -> _Change:
        for k, times in Counter(self.table.used[:at]).items():
            if (effect := self.effects[k]) is not None:
                _add(live, effect.after, times)
        for numbers, sign in ((self.table.early, -1), (self.table.made, 1)):
            for v in [v for index, vs in numbers.items() if index < at for v in vs]:
                live[self.category(v)] += sign * self.size(v)
        effect = self.effects[self.table.used[at]]
        assert effect is not None, f"instruction {at} computes nothing"
        return self._change(at, effect)

    def effect(self, parts: Iterable[PartTemplate]) -> Effect:
        most: int | None = None
        more = 0
        live: dict[Category, int] = {}
        fullest: BytesByCategory = {}
        size, kinds, count = self.sizes, self.kinds, self.count
        for part in parts:
            sizes = {v: size[v // count] for v in (*part.reads, *part.writes)}
            use = self.uses.of(part, sizes)
            for v in part.writes:
                owner = kinds[v // count][1]
                live[owner] = live.get(owner, 0) + sizes[v]
                more += sizes[v]
            if most is None or more + use.beside > most:
                most, fullest = more + use.beside, self._at_fullest(live, use)
            for v in part.frees:
                owner, nbytes = kinds[v // count][1], size[v // count]
                live[owner] = live.get(owner, 0) - nbytes
                more -= nbytes
        return Effect(most or 0, fullest, more, live)

    def _at_fullest(self, live: BytesByCategory, use: PartUse[PartTemplate]) -> BytesByCategory:
        """Return the bytes by category at a part's fullest moment, with its writes allocated."""
        bytes_by_category = dict(live)
        if use.beside >= 0:
            return (
                bytes_by_category | {"workspace": use.beside} if use.beside else bytes_by_category
            )
        gone = -use.beside  # some of the inputs that die here were given back already
        for v in use.part.frees:
            early = (
                0 if v in use.part.held else min(gone, self.size(v))
            )  # held values die after the part
            bytes_by_category[self.category(v)] = bytes_by_category.get(self.category(v), 0) - early
            gone -= early
        return bytes_by_category

    def usage(self, live: Counter[Category], change: _Change) -> Usage:
        """Return the fullest moment of a step, given the bytes held before it."""
        bytes_by_category = live.copy()
        for v in change.early:
            bytes_by_category[self.category(v)] -= self.size(v)
        before = bytes_by_category.total()
        if change.effect.most >= change.effect.more + change.more:
            _add(bytes_by_category, change.effect.fullest, 1)
            return Usage(change.index, before + change.effect.most, _present(bytes_by_category))
        self.apply(bytes_by_category := live.copy(), change)
        return Usage(change.index, bytes_by_category.total(), _present(bytes_by_category))

    def apply(self, live: Counter[Category], change: _Change) -> None:
        """Apply a step to the live bytes."""
        _add(live, change.effect.after, 1)
        for v in change.early:
            live[self.category(v)] -= self.size(v)
        for v in change.made:
            live[self.category(v)] += self.size(v)


def _check_frees(role: RolePlan) -> None:
    """Raise PlanError if an instruction frees a value that is not alive."""
    alive = set(role.allocs_first)
    for index, instr in enumerate(role.program):
        if instr.stream != COMPUTE:
            continue
        moves = [(p.writes, p.frees) for p in instr.parts]
        for writes, frees in [((), instr.frees_before), *moves]:
            alive.update(writes)
            if not alive.issuperset(frees) or len(set(frees)) < len(frees):
                lost = next(v for v in frees if v not in alive or frees.count(v) > 1)
                text = f"frees {lost}, which is not alive there"
                raise PlanError(f"role {role.role}, instruction {index} {instr.name}: {text}")
            alive.difference_update(frees)
        alive.update(instr.allocs_after)


def _add(live: dict[Category, int], more: BytesByCategory, times: int) -> None:
    for category, nbytes in more.items():
        live[category] = live.get(category, 0) + times * nbytes


def _together(live: BytesByCategory, more: BytesByCategory) -> dict[str, int]:
    return {c: b for c in CATEGORIES if (b := live.get(c, 0) + more.get(c, 0))}


def _present(live: Mapping[Category, int]) -> dict[str, int]:
    return {c: live[c] for c in CATEGORIES if live.get(c)}
