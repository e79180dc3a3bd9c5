"""The memory of a plan in program order: a scan over what each instruction allocates and frees.

`Plan` defines the rules; `part_peak` the workspace. Recorded per compute instruction are the bytes by category at its fullest moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from piper_ir.ops import Op
from piper_ir.plan import CATEGORIES, COMPUTE, Category, Part, Plan, RolePlan, part_peak

_Table = dict[Category, int]
_Key = tuple[Op, tuple[int, ...]]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Usage:
    """Most bytes held during instruction `instr` of a role, in all and by category (categories without bytes are absent)."""

    instr: int
    total: int
    bytes: dict[Category, int]


class _Scan:
    """The running state: bytes by category, and what is needed to keep it in constant time per value."""

    def __init__(self, plan: Plan, role: RolePlan) -> None:
        self.plan = plan
        self.live: _Table = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.nbytes: dict[str, int] = {}
        self.category: dict[str, Category] = {}
        self.above: dict[_Key, int] = {}
        for state in role.states:
            self.live[state.category] += state.nbytes
            self.total += state.nbytes
        self.allocate(role.allocs_first)

    def allocate(self, values: Iterable[str]) -> None:
        for v in values:
            value = self.plan.values[v]
            size = self.nbytes[v] = value.nbytes
            self.category[v] = value.category
            self.live[value.category] += size
            self.total += size

    def free(self, values: Iterable[str]) -> None:
        for v in values:
            size = self.nbytes.pop(v)
            self.live[self.category.pop(v)] -= size
            self.total -= size

    def now(self) -> tuple[int, _Table]:
        return self.total, {c: b for c, b in self.live.items() if b}

    def run(self, part: Part) -> tuple[int, _Table | None]:
        """Allocate a part's writes; its fullest moment, with the split when it differs from what is live after its writes."""
        before = self.total
        self.allocate(part.writes)
        workspace = before + self._above(part) - self.total
        if not workspace:
            return self.total, None
        split = dict(self.live)
        split["workspace"] += max(workspace, 0)
        # Below the bytes of its writes: at that moment some of the inputs that die here were gone already.
        gone = -min(workspace, 0)
        for v in part.frees:
            early = min(gone, self.nbytes[v])
            split[self.category[v]] -= early
            gone -= early
        return self.total + workspace, {c: b for c, b in split.items() if b}

    def _above(self, part: Part) -> int:
        """`part_peak`, computed once for all microbatches in which the same inputs die."""
        dying = set(part.frees)
        key = (part.op, tuple([i for i, v in enumerate(part.reads) if v in dying]))
        if not part.frees and not part.writes or isinstance(part.op, Op) and not _repeats(part):
            return part_peak(self.plan, part, self.nbytes)
        if key not in self.above:
            self.above[key] = part_peak(self.plan, part, self.nbytes)
        return self.above[key]
