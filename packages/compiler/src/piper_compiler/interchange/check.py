"""Check whether a table is a schedule.

Every action is there once, in an order without deadlock, with each stage on one device. A lowered table has the
communication that its compute needs. Sends and receives do not hold up their device; compute waits for its inputs.
Messages between two devices must be received in the order of their sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import get_args

from piper_compiler.actions import Action, ActionPhase
from piper_compiler.interchange.table import (
    OF_STAGE,
    Cell,
    CellFault,
    CommCell,
    Rows,
    Transfer,
    check_pair,
)

CellPosition = tuple[int, int]
"""A row and a cell of a table, counted from 0."""
Event = Action | CommCell
PHASES: tuple[ActionPhase, ...] = get_args(ActionPhase)

NO_MAP = (
    "the format has no map of stages to devices, so each stage is on one device: a two-way pipeline (DualPipe) "
    "cannot be expressed in it; dualpipe_v can"
)


@dataclass(frozen=True)
class TableFacts:
    """Hold the facts about a table whose actions are complete.

    Attributes:
        at: the position of each action and each transfer.
        home: stage -> device.
        lowered: whether the table has communication.
    """

    at: dict[Event, CellPosition]
    home: dict[int, int]
    microbatches: int
    lowered: bool

    @property
    def stages(self) -> int:
        return len(self.home)

    def source(self, action: Action) -> Action | None:
        """Return the action of a neighbouring stage whose output this one reads, or None if it reads none."""
        if action.phase == "F":
            return Action(action.stage - 1, "F", action.mb) if action.stage else None
        if action.phase == "W" or action.stage == self.stages - 1:
            return None
        whole = Action(action.stage + 1, "B", action.mb)
        return whole if whole in self.at else Action(action.stage + 1, "I", action.mb)

    def transfer(self, action: Action) -> tuple[CommCell, CommCell] | None:
        """Return the send and the receive that bring an action its input from another device, if it needs them."""
        source = self.source(action)
        if source is None or self.home[source.stage] == self.home[action.stage]:
            return None
        send: Transfer = "SEND_F" if action.phase == "F" else "SEND_B"
        receive: Transfer = "RECV_F" if action.phase == "F" else "RECV_B"
        return CommCell(source.stage, send, action.mb), CommCell(action.stage, receive, action.mb)


def checked(rows: Rows) -> TableFacts:
    """Return the facts of a table; raise CellFault if it is no schedule."""
    facts = _collected(rows)
    _check_complete(facts)
    _check_phases(facts)
    if facts.lowered:
        _check_transfers(facts)
        _check_order_of_messages(facts)
        _check_parameters(rows)
        _check_reductions(rows, facts)
    _check_progress(rows, facts)
    return facts


def _cells(rows: Rows) -> Iterator[tuple[int, int, Cell]]:
    for r, row in enumerate(rows):
        for c, cell in enumerate(row):
            yield r, c, cell


def _events(cell: Cell) -> tuple[Event, ...]:
    return () if cell is None else (cell,) if isinstance(cell, CommCell) else cell


def _collected(rows: Rows) -> TableFacts:
    at: dict[Event, CellPosition] = {}
    home: dict[int, int] = {}
    lowered = any(isinstance(cell, CommCell) for *_, cell in _cells(rows))
    for r, c, cell in _cells(rows):
        if cell is None and lowered:
            raise CellFault(
                r,
                c,
                "this cell is empty, but a lowered schedule has no idle slots; remove the cell",
            )
        if isinstance(cell, tuple) and len(cell) != 1:
            try:
                check_pair(cell)
            except ValueError as e:
                raise CellFault(r, c, str(e)) from None
        for event in _events(cell):
            if home.setdefault(event.stage, r) != r:
                raise CellFault(
                    r, c, f"stage {event.stage} is on device {home[event.stage]} already; {NO_MAP}"
                )
            if isinstance(event, CommCell) and event.kind in OF_STAGE:
                continue  # these may occur several times
            if event in at:
                raise CellFault(
                    r, c, f"{event} stands in cell {at[event][1] + 1} of this row already"
                )
            at[event] = r, c
    _check_computes(rows)
    computed = [e for e in at if isinstance(e, Action)]
    return TableFacts(at, home, 1 + max((a.mb for a in computed), default=-1), lowered)


def _check_computes(rows: Rows) -> None:
    """Check that each device computes something."""
    for r, row in enumerate(rows):
        if not any(isinstance(cell, tuple) for cell in row):
            raise CellFault(
                r,
                0,
                f"device {r} computes nothing; a row holds the actions of one device, so remove an empty line",
            )


def _check_complete(facts: TableFacts) -> None:
    """Check that stages and microbatches count from 0, and each pair of them has a forward and a backward."""
    actions = [e for e in facts.at if isinstance(e, Action)]
    if not actions:
        raise CellFault(0, 0, "the table is empty; a schedule computes something")
    for name, plural, number in (
        ("stage", "stages", attrgetter("stage")),
        ("microbatch", "microbatches", attrgetter("mb")),
    ):
        numbers = {number(a) for a in actions}
        if len(numbers) <= max(numbers):
            missing = next(n for n in range(max(numbers)) if n not in numbers)
            beyond = min((a for a in actions if number(a) > missing), key=lambda a: facts.at[a])
            raise CellFault(
                *facts.at[beyond],
                f"there is no {name} {missing}; {plural} count from 0 without a gap",
            )
    computed = {a.stage for a in actions}
    for event, place in facts.at.items():
        if event.stage not in computed or event.mb >= facts.microbatches:
            raise CellFault(
                *place, f"{event} belongs to a stage or microbatch without actions; remove it"
            )
    for stage, row in facts.home.items():
        for mb in range(facts.microbatches):
            has = {p for p in PHASES if Action(stage, p, mb) in facts.at}
            if has not in ({"F", "B"}, {"F", "I", "W"}):
                there = min((facts.at[Action(stage, p, mb)] for p in has), default=(row, 0))
                names = ", ".join(f"{stage}{p}{mb}" for p in PHASES if p in has) or "nothing"
                raise CellFault(
                    *there,
                    f"stage {stage} has {names} for microbatch {mb}; it needs one F and either one B or one I and "
                    f"one W",
                )


def _check_phases(facts: TableFacts) -> None:
    for action, place in facts.at.items():
        if isinstance(action, Action) and action.phase != "F":
            earlier = Action(action.stage, "I" if action.phase == "W" else "F", action.mb)
            if facts.at[earlier] >= place:
                raise CellFault(*place, f"{action} stands before {earlier}, whose results it needs")


def _check_transfers(facts: TableFacts) -> None:
    """Check that there is one send after the source, one receive before the reader, and nothing else."""
    needed: set[CommCell] = set()
    for action, place in facts.at.items():
        pair = facts.transfer(action) if isinstance(action, Action) else None
        source = facts.source(action) if isinstance(action, Action) else None
        if pair is None or source is None:
            continue
        send, receive = pair
        needed |= {send, receive}
        if receive not in facts.at:
            raise CellFault(
                *place,
                f"{action} needs {receive}, which this device does not have; {source} is on another device",
            )
        if facts.at[receive] > place:
            raise CellFault(*place, f"{action} stands before {receive}, which brings its input")
        if send not in facts.at:
            raise CellFault(
                *facts.at[receive], f"device {facts.home[source.stage]} has no {send} for {receive}"
            )
        if facts.at[send] < facts.at[source]:
            raise CellFault(
                *facts.at[send], f"{send} stands before {source}, whose results it sends"
            )
    for event, place in facts.at.items():
        if isinstance(event, CommCell) and event not in needed:
            raise CellFault(
                *place,
                f"{event} carries nothing that another device needs; remove it (its reader is "
                f"here, or there is none)",
            )


def _check_order_of_messages(facts: TableFacts) -> None:
    sends: dict[tuple[int, int], list[tuple[CellPosition, CellPosition, CommCell]]] = {}
    for action in facts.at:
        pair = facts.transfer(action) if isinstance(action, Action) else None
        if pair is not None:
            send, receive = (facts.at[c] for c in pair)
            sends.setdefault((send[0], receive[0]), []).append((send, receive, pair[1]))
    for (source, _), messages in sends.items():
        messages.sort()
        for (_, first, name), (_, second, late) in pairwise(messages):
            if second < first:
                message = f"{late} stands before {name}, whose message device {source} sends first"
                raise CellFault(
                    *second,
                    f"{message}; messages between two devices arrive in the order in which they are sent",
                )


def _check_parameters(rows: Rows) -> None:
    """Check that a stage with UNSHARD computes between UNSHARD and RESHARD only; other stages need neither."""
    sharded = {
        e.stage
        for *_, cell in _cells(rows)
        for e in _events(cell)
        if isinstance(e, CommCell) and e.kind == "UNSHARD"
    }
    whole: set[int] = set()
    for r, c, cell in _cells(rows):
        for event in _events(cell):
            if isinstance(event, Action):
                if event.stage in sharded - whole:
                    raise CellFault(
                        r,
                        c,
                        f"{event} computes with parameters that are not gathered here; UNSHARD comes first",
                    )
            elif event.kind == "UNSHARD":
                if event.stage in whole:
                    raise CellFault(
                        r, c, f"{event} gathers parameters that are gathered already; remove it"
                    )
                whole.add(event.stage)
            elif event.kind == "RESHARD":
                if event.stage not in whole:
                    raise CellFault(
                        r, c, f"{event} frees parameters that no UNSHARD has gathered; remove it"
                    )
                whole.remove(event.stage)


def _check_reductions(rows: Rows, facts: TableFacts) -> None:
    """Check that REDUCE_GRAD is there for all stages or none, once each, after the stage's last backward."""
    last = {
        a.stage: p
        for a, p in sorted(facts.at.items(), key=lambda item: item[1])
        if isinstance(a, Action)
    }
    reduced: dict[int, CellPosition] = {}
    for r, c, cell in _cells(rows):
        for event in _events(cell):
            if isinstance(event, CommCell) and event.kind == "REDUCE_GRAD":
                if event.stage in reduced:
                    raise CellFault(
                        r,
                        c,
                        f"{event} reduces gradients that cell {reduced[event.stage][1] + 1} has reduced already; "
                        f"remove it",
                    )
                if (r, c) < last[event.stage]:
                    raise CellFault(
                        r, c, f"{event} stands before the last backward of stage {event.stage}"
                    )
                reduced[event.stage] = r, c
    for stage, place in last.items():
        if reduced and stage not in reduced:
            raise CellFault(
                *place,
                f"stage {stage} has no REDUCE_GRAD after this, its last action, while other stages have one",
            )


def _check_progress(rows: Rows, facts: TableFacts) -> None:
    """Run the table: each device in order, a cell as soon as all of its inputs are there."""
    done: set[Event] = set()
    next_cell = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for r, row in enumerate(rows):
            while next_cell[r] < len(row) and all(
                e in done for e in _waits(row[next_cell[r]], facts)
            ):
                done.update(_events(row[next_cell[r]]))
                next_cell[r] += 1
                moved = True
    stuck = [(r, c) for r, c in enumerate(next_cell) if c < len(rows[r])]
    if stuck:
        chain = "; ".join(_waiting(rows, facts, done, place) for place in stuck[:4])
        raise CellFault(*stuck[0], f"the devices wait for each other: {chain}")


def _waits(cell: Cell, facts: TableFacts) -> list[Event]:
    """Return the events that a cell waits for, on other devices or earlier on its own."""
    awaited: list[Event] = []
    for event in _events(cell):
        if isinstance(event, Action):
            pair, source = (facts.transfer(event) if facts.lowered else None), facts.source(event)
            awaited += [pair[0]] if pair is not None else [source] if source is not None else []
    return awaited


def _waiting(rows: Rows, facts: TableFacts, done: set[Event], place: CellPosition) -> str:
    cell = rows[place[0]][place[1]]
    first = next(e for e in _waits(cell, facts) if e not in done)
    where = facts.at[first]
    return (
        f"device {place[0]} at {'&'.join(map(str, _events(cell)))} for {first}, in cell "
        f"{where[1] + 1} of device {where[0]}"
    )
