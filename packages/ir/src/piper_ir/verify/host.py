"""Check rule R38: copies to the memory of the host are brought back, and nothing else touches them."""

from __future__ import annotations

from collections.abc import Iterator

from piper_ir.plan.plan import HOST, Instr, Part, Plan, RolePlan
from piper_ir.program.collectives import FROM_HOST, HOST_COPIES, TO_HOST
from piper_ir.program.ops import COMM, Collective
from piper_ir.verify.columns import PlanColumns
from piper_ir.verify.rules import Findings, part_name


def check_host(findings: Findings) -> None:
    """Check R38 of every role that copies to the memory of its host or names a value there."""
    for role in findings.plan.roles:
        if _touches_host(role):
            for problem, index in _Role(findings, role).problems():
                findings.add("R38-host", problem, role, index)


def brought_back(columns: PlanColumns) -> dict[int, int]:
    """Return the values that come back from the host, each with the value whose copy it is, by number."""
    originals: dict[int, int] = {}
    back: dict[int, int] = {}
    # A shard of parameters comes from a state, and is no value that was copied there.
    copies = columns.rows_of(
        lambda p: isinstance(p.op, Collective) and p.op.kind in HOST_COPIES and bool(p.reads)
    )
    for row in copies.tolist():
        op = columns.parts[columns.row_part[row]].op
        pair = columns.writes.of(row)[0], columns.reads.of(row)[0]
        (originals if isinstance(op, Collective) and op.kind == TO_HOST else back).update([pair])
    return {value: originals[copy] for value, copy in back.items() if copy in originals}


def _touches_host(role: RolePlan) -> bool:
    table = role.table
    ops = (part.op for template in table.templates for part in template.parts)
    return table.values.on_host or any(
        isinstance(op, Collective) and op.kind in HOST_COPIES for op in ops
    )


def _kind(instr: Instr) -> str:
    """Return the kind of a copy between device and host; "" for any other instruction."""
    op = instr.parts[0].op
    return op.kind if isinstance(op, Collective) and op.kind in HOST_COPIES else ""


class _Role:
    """Find faulty copies of one role; `_copied` has the index of the copy of each original."""

    def __init__(self, findings: Findings, role: RolePlan) -> None:
        self._plan: Plan = findings.plan
        self._role = role
        self._program = list(role.program)
        self._hosted = {v for v, (_, category) in findings.kinds.items() if category == HOST}
        self._copied = {
            instr.parts[0].reads[0]: i
            for i, instr in enumerate(self._program)
            if _kind(instr) == TO_HOST
        }

    def problems(self) -> Iterator[tuple[str, int]]:
        """Yield each problem, with the index of its instruction."""
        back: set[str] = set()
        for index, instr in enumerate(self._program):
            kind = _kind(instr)
            if kind:
                yield from ((text, index) for text in self._channel_problems(instr.parts[0]))
            if kind == FROM_HOST:
                back.update(instr.parts[0].reads)
            for part in instr.parts:
                yield from ((text, index) for text in self._part_problems(part, kind, index))
        for original, index in self._copied.items():
            copy = self._program[index].parts[0].writes[0]
            if copy not in back:
                yield f"it copies {original} to {copy}, which nothing brings back", index

    def _channel_problems(self, part: Part) -> Iterator[str]:
        assert isinstance(part.op, Collective)
        channel = self._plan.channel(part.op.channel)
        members = len(self._plan.peers(channel, self._role.ranks[0]))
        if members != 1:
            yield f"{part_name(part)} is on channel {channel.id} of {members} ranks; a rank copies alone"

    def _part_problems(self, part: Part, kind: str, index: int) -> Iterator[str]:
        """Yield the problems of a part of an instruction that is such a copy, or ("") another one."""
        for verb, values, there in (
            ("reads", part.reads, FROM_HOST),
            ("writes", part.writes, TO_HOST),
        ):
            for v in values:
                if (v in self._hosted) != (kind == there):
                    where = "on the host" if v in self._hosted else "on the device"
                    yield f"{part_name(part)} {verb} {v}, which is {where}"
        for v in () if isinstance(part.op, COMM) else part.reads:
            if self._copied.get(v, index) < index:
                yield f"{part_name(part)} reads {v}, which instruction {self._copied[v]} has copied to the host"
