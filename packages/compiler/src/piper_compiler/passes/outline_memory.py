"""The memory of an outline: peaks of roles, by a walk over their instructions as `piper_ir.memory` does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from piper_compiler.passes.arrays import Ints, ints
from piper_compiler.passes.draft import Draft
from piper_compiler.passes.kinds import Effect, Kinds
from piper_compiler.passes.release import Releases
from piper_ir.plan import CATEGORIES, COMPUTE, Category, Plan, State


@dataclass(frozen=True)
class Peak:
    """The first fullest moment of a role: in instruction `at` of it, 0 also for its start."""

    nbytes: int
    at: int
    by_category: Mapping[str, int]


class Memory:
    """What the instructions of an outline allocate and free. `effects`: of each that computes. The receive `received[k]`
    writes into a buffer of place `buffers[k]`, which is made after instruction `made[k]`, or (-1) before the first of its
    role that computes. `early`, `more`: by instruction, the bytes freed before it and made after it."""

    def __init__(self, plan: Plan, kinds: Kinds, draft: Draft, freed: Releases) -> None:
        self.plan, self.kinds, self.draft, self.freed = plan, kinds, draft, freed
        self.effects = self._effects()
        found = [(i, place) for i, kind in enumerate(kinds.used) if kind.instr.stream != COMPUTE for place in kind.writes[0]]
        self.received = ints([i for i, _ in found])
        self.buffers = ints([place for _, place in found])
        before = np.searchsorted(draft.compute, self.received) - 1
        self.made = np.where(draft.computed[self.received] > 0, draft.compute[before], -1)
        sizes = ints(kinds.sizes)
        self.early = np.zeros(len(kinds.used), np.int64)
        np.add.at(self.early, freed.before, sizes[freed.early // kinds.count])
        self.more = np.zeros(len(kinds.used), np.int64)
        after = self.made >= 0
        np.add.at(self.more, self.made[after], sizes[self.buffers[after]])

    def _effects(self) -> list[Effect]:
        """Of each instruction that computes."""
        kinds, freed, compute = self.kinds, self.freed, self.draft.compute
        part = freed.after - kinds.first_part[kinds.instr_of_part[freed.after]]
        dying = list(zip(part.tolist(), (freed.freed // kinds.count).tolist(), strict=True))
        ends = np.searchsorted(freed.after, kinds.first_part[compute]).tolist()
        out = []
        for i, a, b in zip(compute.tolist(), ends, [*ends[1:], len(dying)], strict=True):
            kind, key = kinds.used[i], tuple(dying[a:b])
            out.append(kind.effects.get(key) or kinds.effect(self.plan, kind, key))
        return out

    def allocs_first(self, r: int) -> tuple[str, ...]:
        """The receive buffers of role r that are there from its start."""
        return tuple([self.kinds.names[place] for place in self._first(r).tolist()])

    def _first(self, r: int) -> Ints:
        begin, end = self.draft.offsets[r : r + 2]
        return self.buffers[(self.made < 0) & (self.received >= begin) & (self.received < end)]

    def peak(self, r: int, held: tuple[State, ...]) -> Peak:
        """Of role r, which holds these states."""
        begin, end = self.draft.offsets[r : r + 2]
        a, b = np.searchsorted(self.draft.compute, (begin, end))
        compute, effects = self.draft.compute[a:b], self.effects[a:b]
        start = sum(s.nbytes for s in held) + sum([self.kinds.sizes[place] for place in self._first(r)])
        early, more = self.early[compute], self.more[compute]
        left = ints([e.more for e in effects]) - early + more
        total = start + np.cumsum(left)
        fullest = total - left - early + ints([e.most for e in effects])
        most = np.maximum(fullest, total)
        k = int(np.argmax(most)) if len(most) else -1
        if k < 0 or most[k] <= start:
            return Peak(start, 0, self._split(r, held, 0, None))
        inside = k if fullest[k] >= total[k] else None
        return Peak(int(most[k]), int(compute[k]) - begin, self._split(r, held, k if inside is not None else k + 1, inside))

    def _split(self, r: int, held: tuple[State, ...], steps: int, inside: int | None) -> dict[str, int]:
        """The bytes by category after so many instructions of role r that compute; or in the next one, number `inside`, at its
        fullest moment."""
        begin, end = self.draft.offsets[r : r + 2]
        a, b = np.searchsorted(self.draft.compute, (begin, end))
        compute, effects = self.draft.compute[a:b], self.effects[a:b]
        out: Counter[Category] = Counter()
        for state in held:
            out[state.category] += state.nbytes
        self._count(out, self._first(r), 1)
        times = Counter([id(effect) for effect in effects[:steps]])
        for effect in {id(effect): effect for effect in effects[:steps]}.values():
            for category, nbytes in effect.after.items():
                out[category] += times[id(effect)] * nbytes
        through = compute[steps - 1] if steps else -1
        freeing = through if inside is None else compute[inside]
        self._count(out, self.buffers[(self.made >= begin) & (self.made <= through)], 1)
        freed = self.freed
        self._count(out, freed.early[(freed.before >= begin) & (freed.before <= freeing)] // self.kinds.count, -1)
        if inside is not None:
            effect = effects[inside]
            out.update(effect.fullest)
            if effect.gone:
                out.subtract(self._early(effect.gone, self._freed(begin, int(compute[inside]), effect.part)))
        return {c: out[c] for c in CATEGORIES if out[c]}

    def _count(self, held: Counter[Category], places: Ints, sign: int) -> None:
        kinds = self.kinds
        for place, times in enumerate(np.bincount(places, minlength=1).tolist()):
            if times:
                held[kinds.maker.kinds[kinds.names[place]][1]] += sign * times * kinds.sizes[place]

    def _early(self, gone: int, freed: list[str]) -> Counter[Category]:
        """By category, the first `gone` bytes of what a part frees, as `piper_ir.memory` tells them."""
        out: Counter[Category] = Counter()
        for v in freed:
            early = min(gone, self.kinds.maker.nbytes(v))
            out[self.kinds.maker.kinds[v][1]] += early
            gone -= early
        return out

    def _freed(self, begin: int, at: int, part: int) -> list[str]:
        """What dies in a part of instruction `at`, a chunk's step, as the plan lists it (see `releases`): first what is sent,
        then by its first use; by the names in microbatch 0. `begin`: the first instruction of the role."""
        kinds, freed = self.kinds, self.freed
        values = freed.freed[freed.after == kinds.first_part[at] + part]
        sent = np.isin(values, kinds.uses.sent)
        names = [kinds.names[place] for place in (values // kinds.count).tolist()]
        first: dict[str, int] = {}
        for i in range(begin, at + 1):
            if kinds.used[i].instr.stream == COMPUTE and kinds.mb[i] == kinds.mb[at]:
                for v in [v for p in kinds.used[i].parts for v in (*p.writes, *p.reads)]:
                    first.setdefault(v, len(first))
        others = [*kinds.used[at].inside[part], *[v for v, early in zip(names, sent, strict=True) if not early]]
        return [*[v for v, early in zip(names, sent, strict=True) if early], *sorted(others, key=first.__getitem__)]
