"""Define the table of a schedule in the format of torch.distributed.pipelining: a row per device, a cell per slot.

A cell is empty (idle), a compute action (`2F0`, `3I1`, `0W4`, `1B2`), an overlapped pair (`(0F7;7B3)OVERLAP_F_B`), or,
in a lowered table, communication: `3SEND_F1`, `2RECV_B0` (the microbatch last), `1UNSHARD`, `1RESHARD`, `1REDUCE_GRAD`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from piper_compiler.actions import Action, ActionPhase, Slot

Transfer = Literal["SEND_F", "RECV_F", "SEND_B", "RECV_B"]
OfStage = Literal["UNSHARD", "RESHARD", "REDUCE_GRAD"]
TRANSFERS: tuple[Transfer, ...] = get_args(Transfer)
OF_STAGE: tuple[OfStage, ...] = get_args(OfStage)


@dataclass(frozen=True, slots=True)
class CommCell:
    """Name communication of a stage.

    It is a transfer of one microbatch, or (mb -1) one of the stage's parameters or gradients. SEND_F hands a forward's
    outputs to stage + 1, SEND_B a backward's gradients to stage - 1; with RECV_F and RECV_B `stage` receives them.
    """

    stage: int
    kind: Transfer | OfStage
    mb: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.mb if self.mb >= 0 else ''}"


Cell = Slot | CommCell | None
Rows = tuple[tuple[Cell, ...], ...]

PAIR = "OVERLAP_F_B"
ACCEPTED = f"2F0, 3I1, 0W4, 1B2, (0F7;7B3){PAIR}, 3SEND_F1, 3RECV_B1, 1UNSHARD, 1RESHARD, 1REDUCE_GRAD, or nothing"
_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_TRANSFER = re.compile(rf"(\d{{1,9}})({'|'.join(TRANSFERS)})(\d{{1,9}})")
_OF_STAGE = re.compile(rf"(\d{{1,9}})({'|'.join(OF_STAGE)})")
_PAIR = re.compile(rf"\(([^()]*)\){PAIR}")


class CellFault(Exception):
    """Report an error in one cell; `row` and `cell` count from 0."""

    def __init__(self, row: int, cell: int, message: str) -> None:
        super().__init__(message)
        self.row, self.cell, self.message = row, cell, message


def parse_cell(text: str) -> Cell:
    """Return a cell from its text; raise ValueError, which explains the error in it."""
    text = text.strip()
    if not text:
        return None
    if match := _ACTION.fullmatch(text):
        return (_action(match),)
    if match := _TRANSFER.fullmatch(text):
        return CommCell(int(match[1]), cast(Transfer, match[2]), int(match[3]))
    if match := _OF_STAGE.fullmatch(text):
        return CommCell(int(match[1]), cast(OfStage, match[2]))
    if match := _PAIR.fullmatch(text):
        members = [_ACTION.fullmatch(part.strip()) for part in match[1].split(";")]
        if all(members):
            slot = tuple(_action(m) for m in members if m)
            check_pair(slot)
            return slot
    raise ValueError(f"{text!r} is not an action; accepted are {ACCEPTED}")


def _action(found: re.Match[str]) -> Action:
    return Action(int(found[1]), cast(ActionPhase, found[2]), int(found[3]))


def check_pair(slot: Slot) -> None:
    """Raise ValueError for an overlapped group that the format does not have."""
    if len(slot) != 2 or slot[0].phase != "F" or slot[1].phase == "F":
        raise ValueError(
            f"{PAIR} holds one forward and then one backward, not {'; '.join(map(str, slot)) or 'nothing'}"
        )


def cell_text(cell: Cell) -> str:
    """Return the text of a cell, which `parse_cell` reads back."""
    if cell is None:
        return ""
    if isinstance(cell, CommCell):
        return str(cell)
    members = ";".join(map(str, cell))
    return members if len(cell) == 1 else f"({members}){PAIR}"


AROUND = 3
"""The number of cells, and of rows, shown on each side of a faulty cell."""


def picture(texts: Sequence[Sequence[str]], row: int, cell: int) -> str:
    """Return the table around a cell, with an arrow at it."""
    rows = range(max(0, row - AROUND), min(len(texts), row + AROUND + 1))
    columns = range(
        max(0, cell - AROUND),
        max(cell, min(cell + AROUND, max((len(texts[r]) for r in rows), default=1) - 1)) + 1,
    )
    heads = {c: f"cell {c + 1}" for c in columns}
    shown = {
        r: {c: texts[r][c].strip() if c < len(texts[r]) else "" for c in columns} for r in rows
    }
    widths = {c: max(len(heads[c]), *(len(shown[r][c]) for r in rows)) for c in columns}
    label = max(len(f"device {r}") for r in rows) + 2
    before = label + sum(widths[c] + 2 for c in columns if c < cell)
    lines = [" " * label + "  ".join(heads[c].ljust(widths[c]) for c in columns)]
    for r in rows:
        lines.append(
            f"device {r}".ljust(label) + "  ".join(shown[r][c].ljust(widths[c]) for c in columns)
        )
        if r == row:
            lines.append(" " * before + "^" * max(1, len(shown[r][cell])) + " here")
    return "\n".join(line.rstrip() for line in lines)
