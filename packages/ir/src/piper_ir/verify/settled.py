"""Find in one pass the values that break R11 to R16 or R29; `values` looks at these one by one and says how."""

from __future__ import annotations

import numpy as np

from piper_ir.program.ops import Collective
from piper_ir.verify.columns import AllBefore, FieldUses, Flags, Ints, PlanColumns, flags


def unsettled(columns: PlanColumns, order: AllBefore) -> list[int]:
    """Return the values that are used, and not as the rules of a value's life say, by number."""
    return _Lives(columns, order).bad.nonzero()[0].tolist()


class _Lives:
    """Compare the uses of all values with the rules, each rule for all values at once.

    A value lives on one role, is written once, allocated once if communication writes it and else by its writer, read
    after it is written, freed once, and freed after all uses; on another stream, waits guarantee these orders. Two
    rows of the stream compute of a role are in the order of their numbers. A row stands at place 2 * row + 1, and the
    frees before an instruction at the even place before its first row.

    Attributes:
        bad: by value, whether it breaks a rule.
    """

    def __init__(self, columns: PlanColumns, order: AllBefore) -> None:
        self._columns, self._order = columns, order
        self.bad = np.zeros(columns.count, dtype=np.bool_)
        self._role = columns.role[columns.row_instr]
        self._compute = columns.compute_row
        frees, early = columns.frees, columns.early
        self._writer = self._at(columns.writes.values, columns.writes.rows)
        self._free = self._at(frees.values, 2 * frees.rows + 1)
        self._free[early[0]] = 2 * columns.first_row[early[1]]
        if not len(self._role):
            self.bad[columns.first[0]] = True
            return
        self._once()
        self._at_home()
        # Rules on orders compare rows of one role, and ask for the one writer and the one free.
        self._check_allocations()
        for uses in (columns.reads, columns.held):
            self._check_reads(uses)
            self._check_free(uses.values, uses.rows)
        self._check_spoiled()
        self._check_free(columns.writes.values, columns.writes.rows)

    def _at(self, values: Ints, places: Ints) -> Ints:
        """Return by value the place of its use; any of several."""
        found = np.zeros(self._columns.count, np.int64)
        found[values] = places
        return found

    def _times(self, *values: Ints) -> Ints:
        return np.bincount(np.concatenate(values), minlength=self._columns.count)

    def _once(self) -> None:
        """Check that each value that is used is written once, freed once, and allocated once or with its writer."""
        columns = self._columns
        written = self._times(columns.writes.values)
        freed = self._times(columns.frees.values, columns.early[0])
        made = self._times(columns.made[0], columns.first[0])
        used = (written > 0) | (freed > 0) | (made > 0)
        for uses in (columns.reads, columns.held):
            used[uses.values] = True
        wrong = (written != 1) | (freed != 1) | (made == self._compute[self._writer])
        self.bad |= used & (wrong | (made > 1))

    def _at_home(self) -> None:
        """Check that the role which writes a value is the one that uses it."""
        columns = self._columns
        home = self._role[self._writer]
        for uses in (columns.reads, columns.held, columns.frees):
            self.bad[uses.values[home[uses.values] != self._role[uses.rows]]] = True
        for values, instrs in (columns.early, columns.made):
            self.bad[values[home[values] != columns.role[instrs]]] = True
        values, roles = columns.first
        self.bad[values[home[values] != roles]] = True

    def _late(self, values: Ints, first: Ints, second: Ints) -> Flags:
        """Return where, of a good value, row `first` of communication is perhaps not done before row `second`."""
        late = ~self.bad[values]
        instrs = self._columns.row_instr
        late[late] = ~self._order.precede(instrs[first[late]], instrs[second[late]])
        return late

    def _check_allocations(self) -> None:
        values, instrs = self._columns.made
        good = ~self.bad[values]
        writers = self._columns.row_instr[self._writer[values[good]]]
        self.bad[values[good][~self._order.precede(instrs[good], writers)]] = True

    def _check_reads(self, reads: FieldUses) -> None:
        """Check that each read comes after the write."""
        writer = self._writer[reads.values]
        self.bad[reads.values[writer >= reads.rows]] = True
        asked = (~(self._compute[writer] & self._compute[reads.rows])).nonzero()[0]
        values = reads.values[asked]
        self.bad[values[self._late(values, writer[asked], reads.rows[asked])]] = True

    def _check_spoiled(self) -> None:
        """Check that all other reads of a value come before a collective that leaves it undefined."""
        columns = self._columns
        spoils = flags([isinstance(p.op, Collective) and p.op.law.spoils for p in columns.parts])
        uses = columns.reads
        spoiled = spoils[columns.row_part[uses.rows]]
        by = self._at(uses.values[spoiled], uses.rows[spoiled] + 1)
        self.bad |= self._times(uses.values[spoiled]) > 1
        for uses in (columns.reads, columns.held):
            row = by[uses.values] - 1
            others = ((row >= 0) & (row != uses.rows)).nonzero()[0]
            values = uses.values[others]
            self.bad[values[self._late(values, uses.rows[others], row[others])]] = True

    def _check_free(self, values: Ints, rows: Ints) -> None:
        """Check that a value is freed after a use, by an instruction that has waited for it."""
        free = self._free[values]
        self.bad[values[2 * rows + 1 > free]] = True
        asked = (~self._compute[rows]).nonzero()[0]
        self.bad[values[asked][self._late(values[asked], rows[asked], free[asked] // 2)]] = True
