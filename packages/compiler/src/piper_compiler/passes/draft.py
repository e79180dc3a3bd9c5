"""Drafts: the program of one role while it is being made, as columns, so that every Instr and Part is made once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from piper_ir.ops import Op
from piper_ir.plan import COMPUTE, Instr, Part
from piper_ir.timing import IssueOrder, Waits

Name = TypeVar("Name", bound=str | int)
"""What a value is called: its id, or in an outline a number."""
DraftPart = tuple[str, Op, int, tuple[Name, ...], tuple[Name, ...]]
"""The fields of a Part without its frees: node, op, microbatch, reads, writes."""
Place = tuple[str, int]
"""A stream, and how many of its instructions stand up to this one: what a wait for it names."""


@dataclass(slots=True)
class Releases(Generic[Name]):
    """What a role frees. `frees`: number of a part, counted over the whole program -> values that die after it; `before`:
    instruction -> values that die before it; `waits`: instruction -> what must be done."""

    frees: Mapping[int, Sequence[Name]] = field(default_factory=dict)
    before: Mapping[int, Sequence[Name]] = field(default_factory=dict)
    waits: Mapping[int, Sequence[Place]] = field(default_factory=dict)


@dataclass(slots=True)
class RoleDraft(Generic[Name]):
    """One role's instructions in program order, an entry of each list per instruction. `waits`: none that an earlier instruction
    of the same stream has waited for; `channels`: "" for compute; `seconds`: canonical durations. `compute`: the instructions
    that compute; `allocs_after`: instruction -> receive buffers; `given`: instruction -> the seconds of a span."""

    role: str
    streams: list[str] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    channels: list[str] = field(default_factory=list)
    parts: list[list[DraftPart[Name]]] = field(default_factory=list)
    waits: list[Waits] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    compute: list[int] = field(default_factory=list)
    allocs_after: dict[int, list[Name]] = field(default_factory=dict)
    allocs_first: list[Name] = field(default_factory=list)
    given: dict[int, float] = field(default_factory=dict)

    def append(self, place: Place, channel: str, parts: list[DraftPart[Name]], waits: Waits, seconds: float) -> None:
        """One more instruction, at its place on its stream."""
        if not channel:
            self.compute.append(len(self.streams))
        self.streams.append(place[0])
        self.places.append(place)
        self.channels.append(channel)
        self.parts.append(parts)
        self.waits.append(waits)
        self.seconds.append(seconds)

    def issue_order(self) -> IssueOrder:
        """Without the waits that frees need."""

        def label(k: int) -> str:
            node, op, *_ = self.parts[k][0]
            return f"{node} ({type(op).__name__})"

        return IssueOrder(self.role, self.streams, self.waits, self.channels, label)

    def instructions(self: RoleDraft[str], releases: Releases[str]) -> tuple[Instr, ...]:
        """The program, with its frees and the waits that they need."""
        frees, before, allocs = releases.frees, releases.before, self.allocs_after
        out: list[Instr] = []
        q = 0
        computed = self.final_waits(releases)
        for k, stream in enumerate(self.streams):
            if stream != COMPUTE:
                out.append(Instr(stream, (Part(*self.parts[k][0]),), self.waits[k]))
                q += 1
                continue
            waits = computed.get(k, ())
            parts = []
            for part in self.parts[k]:
                parts.append(Part(*part, tuple(frees[q])) if q in frees else Part(*part))
                q += 1
            out.append(Instr(stream, tuple(parts), waits, tuple(before.get(k, ())), tuple(allocs.get(k, ())), self.given.get(k)))
        return tuple(out)

    def final_waits(self, releases: Releases[Name]) -> dict[int, Waits]:
        """The waits of instructions that compute, with those that frees need, again without repeated ones; without those that
        have none before and after. (Other streams free nothing, so their waits stay.)"""
        out: dict[int, Waits] = {}
        seen: dict[str, int] = {}
        own, more = self.waits, releases.waits
        for k in self.compute:
            if k in more:
                out[k] = unseen([*own[k], *more[k]], seen)
            elif own[k]:
                out[k] = unseen(own[k], seen)
        return out


def unseen(waits: Sequence[Place], known: dict[str, int]) -> Waits:
    """The last place of each stream, sorted, without those that `known`, the earlier waits of the same stream, covers; they are
    added to it."""
    if len(waits) == 1:
        stream, n = waits[0]
        if n <= known.get(stream, 0):
            return ()
        known[stream] = n
        return (waits[0],)
    fresh: dict[str, int] = {}
    for stream, n in waits:
        if n > known.get(stream, 0):
            known[stream] = fresh[stream] = n
    return tuple(sorted(fresh.items()))
