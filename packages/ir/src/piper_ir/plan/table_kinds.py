"""Map the values of a plan to their sizes, and make tables of programs that are given as instructions."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import starmap
from typing import Any

from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.instr_table import InstrTable, Kinds, ValueTable
from piper_ir.plan.instructions import Category, Instr
from piper_ir.tools import no_garbage_collection

_NO_VALUE: tuple[TensorSpec, Category] = TensorSpec((0,), "float32"), "scalar"
"""The kind of a name that is no value of the plan; the verifier refuses such a plan (R06)."""


class TableKinds(Mapping[str, tuple[TensorSpec, Category]]):
    """Map every value of a plan to its size and category.

    The values are the ones of `given`, or else the ones that the programs write, in the order in which they are written.
    """

    def __init__(self, programs: Sequence[InstrTable], given: Kinds | None = None) -> None:
        self.programs, self.given = tuple(programs), given
        # The programs of a plan share their values.
        self._values = self.programs[0].values if self.programs else None

    def are_of(self, program: Sequence[Instr], first: tuple[str, ...]) -> bool:
        """Return whether this map has the values of a program, and of its values that are there from the start."""
        return (
            isinstance(program, InstrTable)
            and program.values is self._values
            and first == tuple(map(program.values.name, program.first))
        )

    def as_dict(self) -> dict[str, tuple[TensorSpec, Category]]:
        """Return the map as a new dict, which is large."""
        if self.given is not None:
            return dict(self.given)
        kinds_by_name: dict[str, tuple[TensorSpec, Category]] = {}
        with no_garbage_collection():
            for program in self.programs:
                values = program.values
                names, kinds, count = values.names, values.kinds, values.count
                kinds_by_name.update({names[v]: kinds[v // count] for v in program.written()})
        return kinds_by_name

    @cached_property
    def _all(self) -> Kinds:
        return self.as_dict() if self.given is None else self.given

    def __getitem__(self, id: str) -> tuple[TensorSpec, Category]:
        values = self._values
        if values is None or self.given is not None or (number := values.known.get(id)) is None:
            return self._all[id]
        return values.kinds[number // values.count]

    def __contains__(self, id: object) -> bool:
        return id in self._all

    def items(self) -> ItemsView[str, tuple[TensorSpec, Category]]:
        """Return ids with their sizes and categories."""
        return self._all.items()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __reduce__(self) -> tuple[Any, ...]:
        return TableKinds, (self.programs, self.given)


def tabulate(
    programs: Sequence[tuple[Sequence[Instr], tuple[str, ...]]], kinds: Kinds
) -> TableKinds:
    """Return the kinds of a plan's values, with its programs as tables of these values.

    `programs` has each with the values that are there from its start. The kinds stay the same object if the programs
    are such tables already.
    """
    if isinstance(kinds, TableKinds) and all(starmap(kinds.are_of, programs)):
        return kinds
    known = dict(kinds.items())
    named = dict(known)
    for program, first in programs:
        parts = [part for instr in program for part in instr.parts]
        for names in (
            first,
            *[x for p in parts for x in (p.reads, p.writes, p.frees, p.held)],
            *[x for instr in program for x in (instr.frees_before, instr.allocs_after)],
        ):
            named.update([(name, _NO_VALUE) for name in names if name not in named])
    values = ValueTable.of(named)
    return TableKinds([InstrTable.of(tuple(x), values, first) for x, first in programs], known)
