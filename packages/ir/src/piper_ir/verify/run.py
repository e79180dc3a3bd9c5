"""Check rules R17 to R20: an abstract run of a plan under every blocking condition of the real engines.

Before an instruction starts, these must be done: its predecessor on its stream; the instructions that it waits for; the
compute before it in program order, since one host thread issues and, on a CPU, computes; and the same for its peers,
since a send, its receive and all members of a collective start and end together. Every condition waits for a fixed set
of instructions. So, in any timing, the run gets to its end exactly when the graph of these conditions has no cycle.
Roles stand for their ranks: the ranks of a role meet each other in equal instructions, so a cycle among ranks folds to
one among roles, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.instr_table import InstrTemplate
from piper_ir.plan.plan import COMPUTE, Channel
from piper_ir.program.collectives import HOST_COPIES
from piper_ir.program.ops import Collective, op_name
from piper_ir.verify.columns import Ints, PlanColumns, flags, ints
from piper_ir.verify.rules import Findings, Violation, instr_title

_Reason = tuple[int, str]
"""An instruction that must be done first, and why."""
_Blocked = tuple[int, int, str]
"""An instruction that cannot start, one that must be done first, and why."""


class Events:
    """Number the events of a plan: instructions that meet on a channel are one event, all others one each.

    Instructions are numbered through all roles. `members[e]` are the instructions of event e, and `event[i]` is the
    event of instruction i.
    """

    def __init__(self, columns: PlanColumns, meetings: list[list[int]]) -> None:
        self.columns = columns
        self.members: list[list[int]] = []
        self.event: list[int] = [-1] * len(columns.role)
        for meeting in meetings:
            self._join(meeting)
        for i, event in enumerate(self.event):
            if event < 0:
                self._join([i])

    def _join(self, instructions: list[int]) -> None:
        for i in instructions:
            self.event[i] = len(self.members)
        self.members.append(instructions)

    def says(self, i: int) -> str:
        """Return the name of an instruction in messages."""
        number, index = self.columns.place(i)
        role = self.columns.plan.roles[number]
        return f"{role.role}[{index}] {instr_title(role.program[index])} on {role.program[index].stream}"


def meetings(findings: Findings) -> list[list[int]]:
    """Return the instructions that meet, numbered through all roles, per channel in order; check R17 and R18."""
    plan, columns = findings.plan, findings.columns
    uses: dict[str, dict[str, list[int]]] = {c.id: {r: [] for r in c.roles} for c in plan.channels}
    for role, start in zip(plan.roles, columns.starts, strict=False):
        for number, id in enumerate(role.table.channels, start):
            if id:
                uses[id][role.role].append(number)
    carried = _Carried(columns)
    all_meetings: list[list[int]] = []
    for channel in plan.channels:
        sides = list(uses[channel.id].values())
        rule = "R17-p2p-match" if channel.kind == "p2p" else "R18-group-match"
        if len({len(s) for s in sides}) > 1:
            verbs = ("sends", "receives") if channel.kind == "p2p" else ("meets",) * len(sides)
            counts = [
                f"role {r} {verb} {len(s)} times"
                for r, verb, s in zip(channel.roles, verbs, sides, strict=True)
            ]
            findings.add(rule, f"channel {channel.id}: {', '.join(counts)}")
            continue
        what = [carried.numbers[side] for side in sides]
        differ = np.any([one != what[0] for one in what], axis=0) if what else ints([])
        for n in differ.nonzero()[0].tolist():
            carry = [carried.of(side[n]) for side in sides]
            findings.add_at(rule, _mismatch(channel, n, carry), sides[0][n])
        all_meetings += map(list, zip(*sides, strict=True))
    return all_meetings


_Carry = tuple[Collective | None, TensorSpec | None]
"""The collective that an instruction is, if any, and the value that it brings to a meeting, if any."""


class _Carried:
    """Number the ops and tensors of communications: communications that fit together have equal `numbers`."""

    def __init__(self, columns: PlanColumns) -> None:
        rows = columns.first_row[:-1]
        values = columns.reads.first_of(rows)
        self._values = np.where(values < 0, columns.writes.first_of(rows), values)
        self._parts = columns.row_part[rows]
        self._columns = columns
        keys = self._parts * (len(columns.table.kinds) + 1) + self._values // columns.table.count
        _, first, same = np.unique(keys, return_index=True, return_inverse=True)
        known: dict[_Carry, int] = {}
        carries = [self.of(i) for i in first.tolist()]
        self.numbers = ints([known.setdefault(carry, len(known)) for carry in carries])[same]

    def of(self, instr: int) -> _Carry:
        """Return the op or the tensor of a communication; of any other instruction, any."""
        op = self._columns.parts[self._parts[instr]].op
        collective = op if isinstance(op, Collective) else None
        if collective is not None and collective.bucket:
            return collective, None
        table = self._columns.table
        return collective, table.kinds[self._values[instr] // table.count][0]


def _mismatch(channel: Channel, n: int, carried: list[_Carry]) -> str:
    texts = [_carried_text(op, spec) for op, spec in carried]
    sides = ", ".join(
        f"{what} on role {role}" for what, role in zip(texts, channel.roles, strict=True)
    )
    return f"number {n} on channel {channel.id} is {sides}; all must carry the same"


def _carried_text(op: Collective | None, spec: TensorSpec | None) -> str:
    if op is None:
        return str(spec)
    return f"{op_name(op)} of {f'bucket {op.bucket}' if op.bucket else spec}"


def run(findings: Findings, events: Events) -> list[int]:
    """Return the events in an order in which they can happen, empty when there is none; check R19 and R20."""
    order = _sweep(events, serial=True)
    if len(order) == len(events.members):
        return order  # every condition of the ordinary run is one of the serial run too
    order = _sweep(events, serial=False)
    serial = len(order) == len(events.members)
    cycle = _cycle(events, order if not serial else _sweep(events, serial=True), serial)
    rule, what = (
        ("R20-issue-order", "if each rank runs its communications one by one in program order")
        if serial
        else ("R19-deadlock", "")
    )
    text = f"the run hangs{' ' if what else ''}{what}; these wait for each other:"
    for i, reason in cycle:
        text += f"\n  {events.says(i)} {reason}"
    number, index = events.columns.place(cycle[0][0])
    findings.violations.append(Violation(rule, text, findings.plan.roles[number].role, index))
    return order if serial else []


def _copies_to_host(template: InstrTemplate) -> bool:
    """Return whether an instruction copies to the memory of the host or back, which meets no other rank."""
    op = template.parts[0].op
    return isinstance(op, Collective) and op.kind in HOST_COPIES


def _conditions(events: Events, serial: bool) -> Iterator[tuple[int, list[_Reason]]]:
    """Yield each instruction with the instructions that must be done before it starts, and why."""
    for role, start in zip(events.columns.plan.roles, events.columns.starts, strict=False):
        last: dict[str, int] = {}
        issued = -1
        table = role.table
        apart = [_copies_to_host(t) for t in table.templates]
        columns = zip(table.streams, table.waits, table.used, strict=True)
        for number, (stream, waits, k) in enumerate(columns, start):
            before: list[_Reason] = (
                [(last[stream], "is next on its stream after")] if stream in last else []
            )
            before += [(start + j, "waits for") for j in waits]
            if stream != COMPUTE:
                if COMPUTE in last:
                    before.append((last[COMPUTE], "is issued after"))
                if serial and not apart[k]:
                    if issued >= 0:
                        before.append((issued, "is issued after"))
                    issued = number
            yield number, before
            last[stream] = number


def _edges(events: Events, serial: bool) -> tuple[Ints, Ints]:
    """Return the same as columns: instructions that must be done, and the ones that wait, which ascend."""
    columns = events.columns
    role, compute = columns.role, columns.compute
    number = {name: n for n, name in enumerate({t.stream for t in columns.templates})}
    stream = ints([number[t.stream] for t in columns.templates])[columns.template]
    apart = flags([_copies_to_host(t) for t in columns.templates])[columns.template]
    at = np.arange(len(role))
    latest = np.maximum.accumulate(np.where(compute, at, -1)) if len(at) else at
    there = ~compute & (latest >= ints(columns.starts)[role])
    by_stream = np.argsort(role * len(number) + stream, kind="stable")
    lines = [(by_stream, (role * len(number) + stream)[by_stream])]
    if serial:
        issued = (~compute & ~apart).nonzero()[0]
        lines.append((issued, role[issued]))
    edges = [columns.waits[::-1], (latest[there], at[there])]
    for line, of in lines:  # each after the one before it
        same = of[1:] == of[:-1]
        edges.append((line[:-1][same], line[1:][same]))
    before, waiter = (np.concatenate(one) for one in zip(*edges, strict=True))
    by_waiter = np.argsort(waiter, kind="stable")
    return before[by_waiter], waiter[by_waiter]


def _sweep(events: Events, serial: bool) -> list[int]:
    """Return the events that can happen, in a possible order: low numbers as early as possible."""
    before, waiter = _edges(events, serial)
    event, n = ints(events.event), len(events.members)
    before, waiter = event[before], event[waiter]
    missing = np.bincount(waiter, minlength=n).tolist()
    after = waiter[np.argsort(before, kind="stable")].tolist()
    ends = np.cumsum(np.bincount(before, minlength=n)).tolist()
    starts = [0, *ends]
    order = [e for e, n in enumerate(missing) if n == 0]
    for e in order:  # grows while it is walked
        for later in after[starts[e] : ends[e]]:
            missing[later] -= 1
            if missing[later] == 0:
                order.append(later)
    return order


def _cycle(events: Events, done: list[int], serial: bool) -> list[tuple[int, str]]:
    """Return a short cycle of waiting among the events that did not happen.

    Each entry is an instruction and why it cannot start, which names the next.
    """
    happened = set(done)
    blocked: dict[int, list[_Blocked]] = {}
    for i, conditions in _conditions(events, serial):
        waits = [
            (i, before, why) for before, why in conditions if events.event[before] not in happened
        ]
        if waits:
            blocked.setdefault(events.event[i], []).extend(waits)
    start = min(blocked)
    walked: set[int] = set()
    while (
        start not in walked
    ):  # each event that did not happen has one before it, so this comes round
        walked.add(start)
        start = events.event[blocked[start][0][1]]
    lines: list[tuple[int, str]] = []
    path = _way_round(events, blocked, start)
    for (i, before, why), (needed, _, _) in zip(path, path[1:] + path[:1], strict=True):
        lines.append((i, f"{why} {events.says(before)}"))
        if before != needed:
            lines.append((before, f"meets {events.says(needed)}"))
    return lines


def _way_round(events: Events, blocked: dict[int, list[_Blocked]], start: int) -> list[_Blocked]:
    """Return the shortest way from an event through the events that block it back to itself, found breadth first."""
    came: dict[int, _Blocked] = {}
    todo = [start]
    for e in todo:  # grows while it is walked
        for block in blocked[e]:
            following = events.event[block[1]]
            if following not in came:
                came[following] = block
                todo.append(following)
        if start in came:
            break
    path = [came[start]]
    while events.event[path[-1][0]] != start:
        path.append(came[events.event[path[-1][0]]])
    return path[::-1]
