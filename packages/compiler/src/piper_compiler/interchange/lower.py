"""Add communication to a compute-only schedule, as torch.distributed.pipelining does.

UNSHARD gathers a stage's parameters as soon as the stage is among the next ones that the device computes; RESHARD frees
them when it no longer is. REDUCE_GRAD follows a stage's last backward. A send follows the action whose results it
sends. The devices are run in turns, and the other device posts the receive at the moment of the send, so that no two
devices wait for each other in whatever order messages are taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from piper_compiler.actions import Action, Slot
from piper_compiler.interchange.check import TableFacts
from piper_compiler.interchange.table import CommCell, Rows

Item = Slot | CommCell
ACTIVE = 3
"""The stages per device whose parameters are whole at once: a forward's, a backward's, and the next one's."""


def with_communication(rows: Rows, facts: TableFacts) -> Rows:
    """Return the lowered table of a compute-only one."""
    computed = [[cell for cell in row if isinstance(cell, tuple)] for row in rows]
    return _with_transfers(
        [_with_reductions(_with_parameters(row), facts.microbatches) for row in computed], facts
    )


def _with_parameters(slots: Sequence[Slot]) -> list[Item]:
    items: list[Item] = []
    whole: set[int] = set()
    for i, slot in enumerate(slots):
        soon = _next_stages(slots[i:])
        items += [CommCell(stage, "RESHARD") for stage in sorted(whole.difference(soon))]
        items += [CommCell(stage, "UNSHARD") for stage in soon if stage not in whole]
        whole = set(soon)
        items.append(slot)
    return [*items, *(CommCell(stage, "RESHARD") for stage in sorted(whole))]


def _next_stages(slots: Sequence[Slot]) -> list[int]:
    """Return the stages that are computed next, in order: at least ACTIVE stages if there are as many."""
    stages: list[int] = []
    for slot in slots:
        stages += [stage for stage in dict.fromkeys(a.stage for a in slot) if stage not in stages]
        if len(stages) >= ACTIVE:
            break
    return stages


def _with_reductions(items: Sequence[Item], microbatches: int) -> list[Item]:
    """Add REDUCE_GRAD after the last action that adds to a stage's gradients."""
    row: list[Item] = []
    backwards: dict[int, int] = {}
    for item in items:
        row.append(item)
        for action in item if isinstance(item, tuple) else ():
            if action.phase in ("B", "W"):
                backwards[action.stage] = backwards.get(action.stage, 0) + 1
                if backwards[action.stage] == microbatches:
                    row.append(CommCell(action.stage, "REDUCE_GRAD"))
    return row


def _with_transfers(rows: Sequence[Sequence[Item]], facts: TableFacts) -> Rows:
    """Let each device in turn do its next item if the inputs have arrived; the schedule does not wait for itself."""
    sends = {
        facts.source(a): pair
        for a in facts.at
        if isinstance(a, Action) and (pair := facts.transfer(a))
    }
    lowered_rows: list[list[Item]] = [[] for _ in rows]
    done: set[Action] = set()
    next_item = [0] * len(rows)
    while any(n < len(row) for n, row in zip(next_item, rows, strict=True)):
        for r, row in enumerate(rows):
            if next_item[r] == len(row):
                continue
            item = row[next_item[r]]
            actions = item if isinstance(item, tuple) else ()
            if any((source := facts.source(a)) is not None and source not in done for a in actions):
                continue
            next_item[r] += 1
            lowered_rows[r].append(item)
            for action in actions:
                done.add(action)
                if action in sends:
                    send, receive = sends[action]
                    lowered_rows[r].append(send)
                    lowered_rows[facts.home[receive.stage]].append(receive)
    return tuple(tuple(row) for row in lowered_rows)
