"""The memory of a plan in program order: a scan over what each instruction allocates and frees.

`Plan` defines the rules, `part_peak` the workspace. Reported are, per compute instruction, the bytes by category at its fullest
moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from piper_ir.errors import PlanError
from piper_ir.ops import Compute
from piper_ir.plan import CATEGORIES, COMPUTE, Category, Part, Plan, RolePlan, part_peak


@dataclass(frozen=True, slots=True)
class Usage:
    """Most bytes held during instruction `instr` of a role, in all and by category (categories without bytes are absent)."""

    instr: int
    total: int
    bytes: dict[str, int]


def scan(plan: Plan, role: RolePlan) -> Iterator[Usage]:
    """The fullest moment of each instruction of the stream "compute", in program order. Needs no peak fields; time linear in the
    values of the role. PlanError when a value is freed that is not alive."""
    state = _Scan(plan, role)
    for index, instr in enumerate(role.program):
        if instr.stream != COMPUTE:
            continue
        where = f"role {role.role}, instruction {index} {instr.name}"
        state.free(instr.frees_before, where)
        total, split = -1, None
        for part in instr.parts:
            most, table = state.run(part)
            if most > total:
                total, split = most, table
            state.free(part.frees, where)
        state.allocate(instr.allocs_after)
        if state.total > total:
            total, split = state.total, state.split()
        assert split is not None, "an instruction has at least one part"
        yield Usage(index, total, split)


def peak(plan: Plan, role: RolePlan) -> Usage:
    """The first fullest moment of a role. A role that computes nothing holds what it has from the start."""
    start = _Scan(plan, role)
    return max(scan(plan, role), key=lambda u: u.total, default=Usage(0, start.total, start.split()))


def with_peaks(plan: Plan) -> Plan:
    """The plan with `peak_bytes`, `peak_at` and `peak_by_category` of every role filled in."""
    roles = []
    for role in plan.roles:
        most = peak(plan, role)
        roles.append(replace(role, peak_bytes=most.total, peak_at=most.instr, peak_by_category=most.bytes))
    return replace(plan, roles=tuple(roles))


class _Scan:
    """What is alive, by category; constant time per value."""

    def __init__(self, plan: Plan, role: RolePlan) -> None:
        self.plan = plan
        self.live: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.nbytes: dict[str, int] = {}
        self.category: dict[str, Category] = {}
        self.above: dict[tuple[Compute, tuple[int, ...]], int] = {}
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

    def free(self, values: Iterable[str], where: str) -> None:
        for v in values:
            if v not in self.nbytes:
                raise PlanError(f"{where}: frees {v}, which is not alive there")
            size = self.nbytes.pop(v)
            self.live[self.category.pop(v)] -= size
            self.total -= size

    def split(self) -> dict[str, int]:
        return {c: b for c, b in self.live.items() if b}

    def run(self, part: Part) -> tuple[int, dict[str, int]]:
        """Allocate what a part writes; the bytes at its fullest moment, in all and by category."""
        before = self.total
        self.allocate(part.writes)
        workspace = before + self._above(part) - self.total
        if workspace >= 0:
            split = self.split()
            if workspace:
                split["workspace"] = workspace
            return self.total + workspace, split
        # Less than its writes: at its fullest moment some of the inputs that die here were gone already.
        live = dict(self.live)
        gone = -workspace
        for v in part.frees:
            early = min(gone, self.nbytes[v])
            live[self.category[v]] -= early
            gone -= early
        return self.total + workspace, {c: b for c, b in live.items() if b}

    def _above(self, part: Part) -> int:
        """`part_peak`; for a chunk's step once for all microbatches in which the same inputs die."""
        if not isinstance(part.op, Compute):
            return part_peak(self.plan, part, self.nbytes)
        dying = set(part.frees)
        key = (part.op, tuple([i for i, v in enumerate(part.reads) if v in dying]))
        if key not in self.above:
            self.above[key] = part_peak(self.plan, part, self.nbytes)
        return self.above[key]
