"""Read and write CSV files of schedules, as torch.distributed.pipelining does."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piper_compiler.actions import Orders
from piper_compiler.interchange.schedule import Schedule, located, schedule_of
from piper_compiler.interchange.table import Cell, CellFault, parse_cell
from piper_compiler.strategy import Strategy
from piper_ir.ground.errors import FormatError, OutputError
from piper_ir.plan.plan import Plan
from piper_ir.tools import unread, write_whole

if TYPE_CHECKING:
    from piper_compiler.compile import Lowered

ScheduleSource = Schedule | Orders | Strategy | Plan


def read_schedule_csv(path: str | Path) -> Schedule:
    """Read a compute-only or lowered schedule: row r is device r, an empty cell an idle slot.

    Raises FormatError, which names the file, the row and the cell that is no action or contradicts the rest, and shows
    the table there.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as e:
        raise FormatError(unread("the schedule", path, e, "give a CSV file of actions")) from None
    return parse_schedule(text, str(path))


def parse_schedule(text: str, name: str = "schedule") -> Schedule:
    """Return a schedule from the text of a file, which errors call `name`."""
    try:
        texts = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as e:
        raise FormatError(f"{name} is no CSV file: {e}") from None
    rows = tuple(
        tuple(_cell(texts, r, c, name) for c in range(len(row))) for r, row in enumerate(texts)
    )
    return Schedule(rows, name, "\r\n" if "\r\n" in text else "\n")


def _cell(texts: list[list[str]], row: int, cell: int, name: str) -> Cell:
    try:
        return parse_cell(texts[row][cell])
    except ValueError as e:
        raise located(name, CellFault(row, cell, str(e)), texts) from None


def write_schedule_csv(
    source: ScheduleSource | Lowered | Any, path: str | Path, *, lowered: bool | None = None
) -> None:
    """Write a schedule for torch.distributed.pipelining.

    Raises FormatError if the format cannot express the schedule, such as a stage on two devices; OutputError when the
    file cannot be written.

    Args:
        source: a schedule as `read_schedule_csv` returns it, orders, a strategy, a plan or a `piper.Compiled`.
        path: the file.
        lowered: whether to write communication: a plan's own, or for other sources the one that torch would add. By
            default a schedule is written as it is, and anything else without communication.
    """
    plan = getattr(source, "plan", source)
    if lowered and isinstance(plan, Plan):
        schedule = Schedule.of_plan(plan, lowered=True)
    else:
        schedule = schedule_of(source)
        if lowered is not None:
            schedule = (
                schedule.with_communication() if lowered else schedule.without_communication()
            )
    try:
        write_whole(Path(path), schedule.dumps())
    except OSError as e:
        raise OutputError(
            f"cannot write the schedule to {path}: {e.strerror}; choose a folder that exists and is writable"
        ) from None
