"""Define a schedule: a table that has been checked, from a file, from orders, or from a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from piper_compiler.actions import Orders, Slot
from piper_compiler.directives import Boundaries, Directive
from piper_compiler.directives.partition import stages_of
from piper_compiler.interchange.check import TableFacts, checked
from piper_compiler.interchange.lower import with_communication
from piper_compiler.interchange.of_plan import rows_of_plan
from piper_compiler.interchange.table import CellFault, Rows, cell_text, picture
from piper_compiler.recipes.scheduled import scheduled
from piper_compiler.strategy import Strategy
from piper_compiler.synthetic import synthetic
from piper_ir.ground.errors import FormatError
from piper_ir.plan.plan import Plan


@dataclass(frozen=True)
class Schedule:
    """Hold a table that is a schedule; making one checks it.

    Raises FormatError, which names `name`, the row and the cell that contradicts the rest.

    Attributes:
        rows: `rows[r]` are the cells of device r of the axis pp: a slot of `orders`, communication, or None for an idle
            slot.
        name: the name of the table in errors.
        newline: how lines of the file end.
    """

    rows: Rows
    name: str = field(default="schedule", compare=False, repr=False)
    newline: str = field(default="\n", compare=False, repr=False)
    _facts: TableFacts = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "_facts", checked(self.rows))
        except CellFault as fault:
            texts = [[cell_text(cell) for cell in row] for row in self.rows]
            raise located(self.name, fault, texts) from None

    @staticmethod
    def of_orders(orders: Orders, name: str = "schedule") -> Schedule:
        """Return the compute-only table of orders, without idle slots."""
        return Schedule(tuple(tuple(tuple(slot) for slot in slots) for slots in orders), name)

    @staticmethod
    def of_plan(plan: Plan, *, lowered: bool = False) -> Schedule:
        """Return the table of a plan: the actions of each device, and in a lowered table its communication.

        A lowered table has UNSHARD and RESHARD if ranks shard parameters and the plan gathers and drops whole stages;
        FormatError if it does not.
        """
        return Schedule(rows_of_plan(plan, lowered=lowered), "plan")

    @property
    def orders(self) -> tuple[tuple[Slot, ...], ...]:
        """Return the slots of each device, in order."""
        return tuple(tuple(cell for cell in row if isinstance(cell, tuple)) for row in self.rows)

    @property
    def stages(self) -> int:
        return self._facts.stages

    @property
    def microbatches(self) -> int:
        return self._facts.microbatches

    @property
    def lowered(self) -> bool:
        """Return whether the table has communication."""
        return self._facts.lowered

    def directives(self, *, at: Boundaries = "even") -> tuple[Directive, ...]:
        """Return the directives that make device r of the axis pp run row r.

        `at` cuts the model into stages, as in `partition`. The communication of a lowered table is checked and then
        dropped: the compiler derives it from the data.
        """
        return scheduled(self.orders, microbatches=self.microbatches, at=at)

    def with_communication(self) -> Schedule:
        """Return the lowered table, with UNSHARD, RESHARD and REDUCE_GRAD, as torch would run this one."""
        return (
            self
            if self.lowered
            else Schedule(with_communication(self.rows, self._facts), self.name, self.newline)
        )

    def without_communication(self) -> Schedule:
        """Return the compute-only table."""
        return Schedule.of_orders(self.orders, self.name) if self.lowered else self

    def dumps(self) -> str:
        """Return the file's text."""
        return "".join(",".join(map(cell_text, row)) + self.newline for row in self.rows)


LONGEST_CELL = 40
"""The characters of a cell that an error shows."""


def located(name: str, fault: CellFault, texts: list[list[str]]) -> FormatError:
    """Return the error for a fault in a table, with a picture of the table and an arrow."""
    shown = [[text[:LONGEST_CELL] for text in row] for row in texts] or [[]]
    message = fault.message
    for cell in texts[fault.row][fault.cell : fault.cell + 1] if texts else ():
        message = message.replace(cell, cell[:LONGEST_CELL]) if cell else message
    where = f"{name}: row {fault.row + 1} (device {fault.row}), cell {fault.cell + 1}: {message}"
    return FormatError(f"{where}\n\n{picture(shown, fault.row, fault.cell)}")


def schedule_of(source: Any) -> Schedule:
    """Return a schedule of orders, of a plan (also one held as `plan`, as in `piper.Compiled`), or of a strategy.

    A strategy is compiled for a synthetic program of as many stages.
    """
    source = getattr(source, "plan", source)
    if isinstance(source, Schedule):
        return source
    if isinstance(source, Plan):
        return Schedule.of_plan(source)
    if isinstance(source, Strategy):
        return Schedule.of_plan(plan_of(source))
    return Schedule.of_orders(source)


def plan_of(strategy: Strategy) -> Plan:
    """Return the plan of a strategy for a synthetic program with as many stages as its `partition` makes."""
    from piper_compiler.compile import compile_program

    stages = stages_of(strategy.directives)
    if stages is None:
        raise FormatError(
            "the strategy has no partition, so its stages are not known; compile it, and write the plan"
        )
    return compile_program(synthetic(stages=stages, F=1, I=1, W=1), strategy).plan
