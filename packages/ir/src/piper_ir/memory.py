"""The memory of a plan in program order: a scan over what each instruction allocates and frees.

`Plan` defines the rules, `part_peak` the workspace. Reported are, per compute instruction, the bytes by category at its fullest
moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from piper_ir.errors import PlanError
from piper_ir.ops import Compute
from piper_ir.plan import CATEGORIES, COMPUTE, Category, Instr, Part, Plan, RolePlan, part_peak


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
        if instr.stream == COMPUTE:
            found = state.fullest(index, instr, -1)
            assert found is not None, "bytes are never negative"
            yield found


def peak(plan: Plan, role: RolePlan) -> Usage:
    """The first fullest moment of a role. A role that computes nothing holds what it has from the start."""
    state = _Scan(plan, role)
    most = Usage(0, state.total, state.split())
    for index, instr in enumerate(role.program):
        if instr.stream == COMPUTE:
            most = state.fullest(index, instr, most.total) or most
    return most


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
        self.plan, self.role = plan, role.role
        self.live: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.nbytes: dict[str, int] = {}
        self.sizes: dict[int, int] = {}
        self.above: dict[tuple[str, str, tuple[int, ...]], int] = {}
        for state in role.states:
            self.live[state.category] += state.nbytes
            self.total += state.nbytes
        self.allocate(role.allocs_first)

    def fullest(self, index: int, instr: Instr, floor: int) -> Usage | None:
        """Run an instruction; its fullest moment, or None when that has no more than `floor` bytes."""
        most = None
        self.free(instr.frees_before, index, instr)
        for part in instr.parts:
            before = self.total
            self.allocate(part.writes)
            total = before + self._above(part)
            if total > floor:
                floor, most = total, Usage(index, total, self._split_at(total, part))
            self.free(part.frees, index, instr)
        self.allocate(instr.allocs_after)
        if self.total > floor:
            most = Usage(index, self.total, self.split())
        return most

    def allocate(self, values: Iterable[str]) -> None:
        known, sizes, nbytes, live = self.plan.values, self.sizes, self.nbytes, self.live
        for v in values:
            value = known[v]
            size = sizes.get(id(value.spec), -1)  # microbatches share specs: objects that the plan keeps alive
            if size < 0:
                size = sizes[id(value.spec)] = value.nbytes
            nbytes[v] = size
            live[value.category] += size
            self.total += size

    def free(self, values: Iterable[str], index: int, instr: Instr) -> None:
        known, nbytes, live = self.plan.values, self.nbytes, self.live
        for v in values:
            if v not in nbytes:
                raise PlanError(f"role {self.role}, instruction {index} {instr.name}: frees {v}, which is not alive there")
            size = nbytes.pop(v)
            live[known[v].category] -= size
            self.total -= size

    def split(self) -> dict[str, int]:
        return {c: b for c, b in self.live.items() if b}

    def _split_at(self, total: int, part: Part) -> dict[str, int]:
        """By category when a part, its writes allocated, holds `total` bytes."""
        if total >= self.total:
            workspace = {"workspace": total - self.total} if total > self.total else {}
            return self.split() | workspace
        # Less than its writes: at its fullest moment some of the inputs that die here were gone already.
        live = dict(self.live)
        gone = self.total - total
        for v in part.frees:
            early = min(gone, self.nbytes[v])
            live[self.plan.values[v].category] -= early
            gone -= early
        return {c: b for c, b in live.items() if b}

    def _above(self, part: Part) -> int:
        """`part_peak`; for a chunk's step once for all microbatches in which the same inputs die."""
        if not isinstance(part.op, Compute):
            return part_peak(self.plan, part, self.nbytes)
        op, dying = part.op, part.frees
        key = (op.chunk, op.step, tuple([i for i, v in enumerate(part.reads) if v in dying]))
        if key not in self.above:
            self.above[key] = part_peak(self.plan, part, self.nbytes)
        return self.above[key]
