"""Drafts: the program of one role while it is being made, as columns, so that every Instr and Part is made once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from piper_ir.ops import COMM, Op
from piper_ir.plan import COMPUTE, Instr, Part
from piper_ir.timing import IssueOrder

DraftPart = tuple[str, Op, int, tuple[str, ...], tuple[str, ...]]
"""The fields of a Part without its frees: node, op, microbatch, reads, writes."""
Waits = tuple[tuple[str, int], ...]
NOTHING: Mapping[str, int] = {}


@dataclass(slots=True)
class Releases:
    """What a role frees. `frees`: number of a part, counted over the whole program -> values that die after it; `before`:
    instruction -> values that die before it; `waits`: instruction -> stream -> how many of its instructions must be done."""

    frees: Mapping[int, Sequence[str]] = field(default_factory=dict)
    before: Mapping[int, Sequence[str]] = field(default_factory=dict)
    waits: Mapping[int, Mapping[str, int]] = field(default_factory=dict)


@dataclass(slots=True)
class RoleDraft:
    """One role's instructions in program order, an entry of each list per instruction. `waits`: none that an earlier instruction
    of the same stream has waited for; `seconds`: canonical durations; `allocs_after`: instruction -> receive buffers; `given`:
    instruction -> the seconds of a span."""

    role: str
    streams: list[str] = field(default_factory=list)
    parts: list[list[DraftPart]] = field(default_factory=list)
    waits: list[Waits] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    allocs_after: dict[int, list[str]] = field(default_factory=dict)
    allocs_first: list[str] = field(default_factory=list)
    given: dict[int, float] = field(default_factory=dict)

    def issue_order(self) -> IssueOrder:
        ops = [parts[0][1] for parts in self.parts]
        channels = [op.channel if isinstance(op, COMM) else "" for op in ops]
        return IssueOrder(
            self.role, self.streams, self.waits, channels, lambda k: f"{self.parts[k][0][0]} ({type(ops[k]).__name__})"
        )

    def instructions(self, releases: Releases) -> tuple[Instr, ...]:
        """The program, with its frees and the waits that they need."""
        frees, before, allocs = releases.frees, releases.before, self.allocs_after
        out: list[Instr] = []
        q = 0
        for k, (stream, waits) in enumerate(zip(self.streams, self.final_waits(releases), strict=True)):
            if stream != COMPUTE:
                out.append(Instr(stream, (Part(*self.parts[k][0]),), waits))
                q += 1
                continue
            parts = []
            for part in self.parts[k]:
                parts.append(Part(*part, tuple(frees[q])) if q in frees else Part(*part))
                q += 1
            out.append(Instr(stream, tuple(parts), waits, tuple(before.get(k, ())), tuple(allocs.get(k, ())), self.given.get(k)))
        return tuple(out)

    def final_waits(self, releases: Releases) -> list[Waits]:
        """The waits of each instruction with those that frees need, again without repeated ones."""
        more, seen = releases.waits, dict[str, int]()
        out = []
        for k, waits in enumerate(self.waits):
            if self.streams[k] == COMPUTE and (waits or k in more):  # other streams free nothing, so their waits stay
                waits = unseen(merged(waits, more.get(k, NOTHING)), seen)
            out.append(waits)
        return out


def merged(waits: Waits, more: Mapping[str, int]) -> dict[str, int]:
    """Both waits as one."""
    out = dict(waits)
    for stream, n in more.items():
        if n > out.get(stream, 0):
            out[stream] = n
    return out


def unseen(waits: Mapping[str, int], known: dict[str, int]) -> Waits:
    """The waits, sorted, without those that `known`, the earlier waits of the same stream, covers; they are added to it."""
    fresh = [wait for wait in waits.items() if wait[1] > known.get(wait[0], 0)]
    if not fresh:
        return ()
    if len(fresh) > 1:
        fresh.sort()
    known.update(fresh)
    return tuple(fresh)
