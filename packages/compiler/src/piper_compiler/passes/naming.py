"""The instructions of a draft with their names: parts, frees, allocations, waits."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from piper_compiler.passes.arrays import Ints, ints
from piper_compiler.passes.dependencies import Dependencies
from piper_compiler.passes.draft import Draft
from piper_compiler.passes.parts import DraftPart, PartMaker
from piper_compiler.passes.release import Releases, Uses
from piper_ir.plan import COMPUTE, Instr, Part


class Named:
    """The instructions of a draft, with the `parts` and the canonical `seconds` of each. `spans`: the seconds of the instructions
    whose first node this is."""

    def __init__(self, draft: Draft, deps: Dependencies, maker: PartMaker, spans: Mapping[int, float]) -> None:
        self.draft = draft
        self.streams = [stream for order in draft.orders for stream in order.streams]
        self.parts: list[list[DraftPart]] = []
        self.seconds: list[float] = []
        self.given: dict[int, float] = {}
        for i, (stream, nodes) in enumerate(zip(self.streams, draft.tasks, strict=True)):
            made, seconds = maker.task(deps, nodes) if stream == COMPUTE else maker.comm(deps, nodes[0])
            if nodes[0] in spans:
                seconds = self.given[i] = spans[nodes[0]]
            self.parts.append(made)
            self.seconds.append(seconds)
        self.names: list[str] = []
        self.uses = self._uses()

    def _uses(self) -> Uses:
        numbers: dict[str, int] = {}
        value, part, instr, sent, sender = list[int](), list[int](), list[int](), list[int](), list[int]()
        for i, (stream, parts) in enumerate(zip(self.streams, self.parts, strict=True)):
            for _, _, _, reads, writes in parts:
                if stream != COMPUTE:
                    sent += [numbers.setdefault(v, len(numbers)) for v in reads]
                    sender += [i] * len(reads)
                    continue
                touched = [numbers.setdefault(v, len(numbers)) for v in (*writes, *reads)]
                value += touched
                part += [len(instr)] * len(touched)
                instr.append(i)
        self.names = list(numbers)
        return Uses(len(numbers), ints(value), ints(part), ints(instr), ints(sent), ints(sender))

    def allocs_first(self) -> list[tuple[str, ...]]:
        """Per role, the receive buffers that are there before its first instruction that computes."""
        after = self._allocs_after()
        return [tuple(after.get(-1 - r, ())) for r, _ in enumerate(self.draft.roles)]

    def _allocs_after(self) -> dict[int, list[str]]:
        """The receive buffers made after an instruction, or (-1 - r) before the first of role r that computes: right after the
        latest that computes before the receive is posted."""
        out: dict[int, list[str]] = {}
        for r, (first, end) in enumerate(pairwise(self.draft.offsets)):
            latest = -1 - r
            for i in range(first, end):
                if self.streams[i] == COMPUTE:
                    latest = i
                elif written := self.parts[i][0][4]:
                    out.setdefault(latest, []).extend(written)
        return out

    def programs(self, freed: Releases) -> list[tuple[Instr, ...]]:
        """Per role its instructions, with their frees and the waits that these need."""
        waits = self._waits(freed)
        frees, before, after = self._by(freed.after, freed.freed), self._by(freed.before, freed.early), self._allocs_after()
        out: list[Instr] = []
        q = 0
        for i, stream in enumerate(self.streams):
            if stream != COMPUTE:
                out.append(Instr(stream, (Part(*self.parts[i][0]),), waits[i]))
                continue
            parts = []
            for part in self.parts[i]:
                parts.append(Part(*part, tuple(frees[q])) if q in frees else Part(*part))
                q += 1
            early, allocs = tuple(before.get(i, ())), tuple(after.get(i, ()))
            out.append(Instr(stream, tuple(parts), waits[i], early, allocs, self.given.get(i)))
        return [tuple(out[a:b]) for a, b in pairwise(self.draft.offsets)]

    def _waits(self, freed: Releases) -> list[tuple[tuple[str, int], ...]]:
        """Of each instruction, the streams that it waits for and how many of their instructions."""
        place = {i: n for nodes in self.draft.bare.streams for n, i in enumerate(nodes, 1)}
        needed = self.draft.needed(self.draft.waits + freed.waits)
        return [tuple([(self.streams[j], place[j]) for j in mine]) for mine in needed]

    def _by(self, places: Ints, values: Ints) -> dict[int, list[str]]:
        """The names of values by their places."""
        out: dict[int, list[str]] = {}
        for place, value in zip(places.tolist(), values.tolist(), strict=True):
            out.setdefault(place, []).append(self.names[value])
        return out
