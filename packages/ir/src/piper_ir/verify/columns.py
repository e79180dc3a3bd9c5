"""Keep the programs of a plan as columns of numbers, so that a rule is checked per template or in one pass.

Instructions are numbered through all roles, values as in `ValueTable`; a value of the whole step has one number. A
*row* is one part of one instruction. `HappensBefore` says which instructions are done before others start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from piper_ir.plan.instr_table import PartTemplate, ValueTable
from piper_ir.plan.plan import COMPUTE, Plan, RolePlan

Ints: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]
LAST = 1 << 30
"""The index of a part that stands for the allocations after all parts; -1 stands for the frees before them."""


def ints(numbers: Sequence[int]) -> Ints:
    """Return numbers as a column."""
    return np.asarray(numbers, dtype=np.int64)


def flags(truths: Sequence[bool]) -> Flags:
    """Return truth values as a column."""
    return np.asarray(truths, dtype=np.bool_)


def spread(counts: Ints, starts: Ints) -> tuple[Ints, Ints]:
    """Return the item and the place of each place, where item i has `counts[i]` places from `starts[i]` on."""
    items = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return items, np.arange(len(items)) - (first - starts)[items]


def flat(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints, Ints]:
    """Return the lengths of lists, where each starts in the flat list, and the flat list."""
    counts = ints([len(x) for x in lists])
    return counts, np.cumsum(counts) - counts, ints([n for x in lists for n in x])


class FieldUses:
    """Hold one field of all parts, such as `reads`.

    The part in row `rows[n]` names the value `values[n]`, which is name `slots[n]` of the names of all templates.
    """

    def __init__(self, values: Ints, rows: Ints, slots: Ints, starts: Ints) -> None:
        self.values, self.rows, self.slots = values, rows, slots
        self._starts = starts

    @cached_property
    def _listed(self) -> tuple[list[int], list[int]]:
        """Return the values, and the start of each row among them, as lists, which are quicker to read one by one."""
        return self.values.tolist(), self._starts.tolist()

    def of(self, row: int) -> list[int]:
        """Return the values that the part in a row names."""
        values, starts = self._listed
        return values[starts[row] : starts[row + 1]]

    def first_of(self, rows: Ints) -> Ints:
        """Return the first value that the part in each row names; -1 if there is none."""
        starts = self._starts[rows]
        found = np.full(len(rows), -1)
        some = starts < self._starts[rows + 1]
        found[some] = self.values[starts[some]]
        return found


class PlanColumns:
    """Hold the columns of a plan whose streams and channels exist.

    Attributes:
        starts: by role, its first instruction; and the number of all.
        role, index: by instruction, the role's number and its index in the role's program.
        template, mb: by instruction, its template (numbered through all roles) and microbatch.
        compute: by instruction, whether it stands on the stream compute.
        parts: the parts of all templates.
        first_row: by instruction, its first row; and the number of all.
        row_instr, row_index, row_part, row_mb: by row, its instruction, its index in it, its number in `parts`, and its
            microbatch.
        count: how many numbers values have.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        tables = [role.table for role in plan.roles]
        self.table = tables[0].values if tables else ValueTable.of({})
        self.starts = list(accumulate([len(t) for t in tables], initial=0))
        self._start = {r.role: n for r, n in zip(plan.roles, self.starts, strict=False)}
        self.role = np.repeat(np.arange(len(tables)), np.diff(self.starts))
        self.index = np.arange(self.starts[-1]) - ints(self.starts)[self.role]
        self.templates = [t for table in tables for t in table.templates]
        first = accumulate([len(table.templates) for table in tables], initial=0)
        self.template = _joined([ints(t.used) + k for t, k in zip(tables, first, strict=False)])
        self.mb = _joined([ints(t.mbs) for t in tables])
        self.compute = flags([t.stream == COMPUTE for t in self.templates])[self.template]
        self.parts: list[PartTemplate] = [p for t in self.templates for p in t.parts]
        many = ints([len(t.parts) for t in self.templates])
        self.first_part = np.cumsum(many) - many
        counts = many[self.template]
        self.first_row = np.concatenate(([0], np.cumsum(counts)))
        self.row_instr, self.row_part = spread(counts, self.first_part[self.template])
        self.row_index = self.row_part - self.first_part[self.template][self.row_instr]
        self.row_mb = self.mb[self.row_instr] + ints([p.ahead for p in self.parts])[self.row_part]
        self.count = len(self.table.ids) * self.table.count

    @property
    def compute_row(self) -> Flags:
        """Return by row whether it stands on the stream compute."""
        return self.compute[self.row_instr]

    @cached_property
    def reads(self) -> FieldUses:
        """Return the values that parts read."""
        return self._uses([p.reads for p in self.parts])

    @cached_property
    def writes(self) -> FieldUses:
        """Return the values that parts write."""
        return self._uses([p.writes for p in self.parts])

    @cached_property
    def frees(self) -> FieldUses:
        """Return the values that parts free."""
        return self._uses([p.frees for p in self.parts])

    @cached_property
    def held(self) -> FieldUses:
        """Return the values of sharded buckets that parts use in place of states."""
        return self._uses([p.held for p in self.parts])

    @cached_property
    def early(self) -> tuple[Ints, Ints]:
        """Return values that are freed before an instruction's parts run, and the instructions."""
        return self._beside([role.table.early for role in self.plan.roles])

    @cached_property
    def made(self) -> tuple[Ints, Ints]:
        """Return values that are allocated after an instruction's parts ran, and the instructions."""
        return self._beside([role.table.made for role in self.plan.roles])

    @cached_property
    def first(self) -> tuple[Ints, Ints]:
        """Return values that are there from the start, and the numbers of the roles."""
        lists = [role.table.first for role in self.plan.roles]
        counts, _, values = flat(lists)
        return self.known(values), np.repeat(np.arange(len(lists)), counts)

    @cached_property
    def waits(self) -> tuple[Ints, Ints]:
        """Return instructions that wait and the instructions that they wait for, past the role's last if astray."""
        counts, _, on = flat([w for role in self.plan.roles for w in role.table.waits])
        waiting = np.repeat(np.arange(len(counts)), counts)
        return waiting, on + ints(self.starts)[self.role[waiting]]

    def known(self, values: Ints) -> Ints:
        """Return the one number of each value: a value of the whole step has one in all microbatches."""
        many = self.table.count
        return np.where(self._whole[values // many], values // many * many, values)

    @cached_property
    def _whole(self) -> Flags:
        return flags(self.table.whole)

    def _uses(self, lists: Sequence[tuple[int, ...]]) -> FieldUses:
        counts, starts, named = flat(lists)
        each = counts[self.row_part]
        rows, slots = spread(each, starts[self.row_part])
        shift = np.maximum(self.mb, 0)[self.row_instr]
        values = self.known(named[slots] + shift[rows])
        return FieldUses(values, rows, slots, np.concatenate(([0], np.cumsum(each))))

    def _beside(self, tables: Sequence[Mapping[int, tuple[int, ...]]]) -> tuple[Ints, Ints]:
        values: list[int] = []
        instrs: list[int] = []
        for start, table in zip(self.starts, tables, strict=False):
            for i, numbers in table.items():
                values += numbers
                instrs += [start + i] * len(numbers)
        return self.known(ints(values)), ints(instrs)

    def place(self, instr: int) -> tuple[int, int]:
        """Return the number of an instruction's role, and its index there."""
        return int(self.role[instr]), int(self.index[instr])

    def rows_at(self, role: RolePlan, index: int) -> range:
        """Return the rows of an instruction of a role."""
        instr = self._start[role.role] + index
        return range(int(self.first_row[instr]), int(self.first_row[instr + 1]))

    def rows_of(self, fact: Callable[[PartTemplate], bool]) -> Ints:
        """Return the rows, in program order, of parts with a fact."""
        return flags([fact(p) for p in self.parts])[self.row_part].nonzero()[0]


def _joined(columns: Sequence[Ints]) -> Ints:
    return np.concatenate(columns) if columns else ints([])


class HappensBefore:
    """Say which instructions of a role happen before which others, by stream order and waits, closed transitively.

    Each instruction has a vector clock: how many instructions of each stream are done when it is done. The order in
    which the host issues does not count: a device runs ahead of or behind it.
    """

    def __init__(self, role: RolePlan) -> None:
        table = role.table
        numbers = {stream: c for c, stream in enumerate(role.streams)}
        column = [numbers[t.stream] for t in table.templates]
        last: list[list[int]] = [[0] * len(numbers) for _ in numbers]
        self._done: list[list[int]] = []
        self._column: list[int] = [column[k] for k in table.used]
        self._position: list[int] = []
        for c, waits in zip(self._column, table.waits, strict=True):
            before = last[c]
            clock = before.copy()
            for j in waits:
                clock = list(map(max, clock, self._done[j]))
            self._position.append(before[c])
            clock[c] = before[c] + 1
            self._done.append(clock)
            last[c] = clock

    def precedes(self, first: int, second: int) -> bool:
        """Return whether instruction `first` is done whenever instruction `second` starts."""
        return first != second and self._done[second][self._column[first]] > self._position[first]

    def late(self, firsts: Sequence[int], second: int) -> list[int]:
        """Return which of the instructions `firsts` may not be done when instruction `second` starts."""
        done, column, position = self._done[second], self._column, self._position
        return [i for i in firsts if i == second or done[column[i]] <= position[i]]


class AllBefore:
    """Say the same of pairs of instructions that are numbered through all roles; each pair is of one role."""

    def __init__(self, orders: Sequence[HappensBefore]) -> None:
        width = max([len(o._done[0]) for o in orders if o._done], default=0)
        clocks = [clock + [0] * (width - len(clock)) for o in orders for clock in o._done]
        self._done = ints([n for clock in clocks for n in clock]).reshape(len(clocks), width)
        self._column = ints([c for o in orders for c in o._column])
        self._position = ints([p for o in orders for p in o._position])

    def precede(self, first: Ints, second: Ints) -> Flags:
        """Return for each pair whether `first` is done whenever `second` starts."""
        done: Flags = self._done[second, self._column[first]] > self._position[first]
        done &= first != second
        return done
