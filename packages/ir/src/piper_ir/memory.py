"""The memory of a plan in program order: a scan over what each instruction allocates and frees.

`Plan` defines the rules, `part_peak` the workspace. Reported are, per compute instruction, the bytes by category at its fullest
moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from piper_ir.errors import PlanError
from piper_ir.ops import Compute
from piper_ir.plan import CATEGORIES, COMPUTE, Category, DeviceType, Instr, Part, Plan, RolePlan, part_peak
from piper_ir.sizes import bind


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
            yield state.fullest(index, instr)


def peak(plan: Plan, role: RolePlan) -> Usage:
    """The first fullest moment of a role. A role that computes nothing holds what it has from the start."""
    at = _fullest(plan, role)
    if at < 0:
        state = _Scan(plan, role)
        return Usage(0, state.total, state.split())
    before = _Totals(plan, role)
    for index, instr in enumerate(role.program[:at]):
        if instr.stream == COMPUTE:
            before.change(index, instr)
    return _Scan(plan, role, before).fullest(at, role.program[at])


def _fullest(plan: Plan, role: RolePlan) -> int:
    """The first instruction of a role that reaches its peak; -1 when none holds more than what is there from the start. Totals
    alone: where categories do not matter, the writes of a chunk's step are allocated as one."""
    at, state = -1, _Totals(plan, role)
    most = state.total
    for index, instr in enumerate(role.program):
        if instr.stream == COMPUTE and (total := state.run(index, instr)) > most:
            at, most = index, total
    return at


def with_peaks(plan: Plan) -> Plan:
    """The plan with `peak_bytes`, `peak_at` and `peak_by_category` of every role filled in."""
    roles = []
    for role in plan.roles:
        most = peak(plan, role)
        roles.append(replace(role, peak_bytes=most.total, peak_at=most.instr, peak_by_category=most.bytes))
    return replace(plan, roles=tuple(roles))


def on_device(plan: Plan, device: DeviceType) -> Plan:
    """The plan with the peaks that it has on a kind of device; itself when they are those already."""
    return plan if plan.device == device else with_peaks(replace(plan, device=device))


class _Totals:
    """How many bytes are alive; `nbytes` says which."""

    def __init__(self, plan: Plan, role: RolePlan, first: Iterable[str] | None = None) -> None:
        self.plan, self.role, self.kinds = plan, role.role, plan.kinds
        self.total = sum(state.nbytes for state in role.states)
        self.nbytes: dict[str, int] = {}
        self.written: dict[tuple[str, str], tuple[tuple[int, ...], int]] = {}
        self.above: dict[tuple[str, str, tuple[bool, ...]], int] = {}
        self.sizes: dict[int, int] = {}
        self.allocate(role.allocs_first if first is None else first)

    def run(self, index: int, instr: Instr) -> int:
        """Run an instruction; the most bytes that it holds."""
        if instr.frees_before:
            self.free(instr.frees_before, index, instr)
        most = 0
        for part in instr.parts:
            before = self.total
            self.write(part)
            most = max(most, before + self.held(part))
            if part.frees:
                self.free(part.frees, index, instr)
        if instr.allocs_after:
            self.allocate(instr.allocs_after)
        return max(most, self.total)

    def change(self, index: int, instr: Instr) -> None:
        """As `run`, for who does not ask how much it holds meanwhile."""
        if instr.frees_before:
            self.free(instr.frees_before, index, instr)
        for part in instr.parts:
            self.write(part)
            if part.frees:
                self.free(part.frees, index, instr)
        if instr.allocs_after:
            self.allocate(instr.allocs_after)

    def allocate(self, values: Iterable[str]) -> None:
        for v in values:
            size = self.nbytes[v] = self.size(v)
            self.total += size

    def write(self, part: Part) -> None:
        """Allocate what a part writes; the microbatches of a chunk's step write the same sizes."""
        op = part.op
        if not isinstance(op, Compute):
            self.allocate(part.writes)
            return
        known = self.written.get((op.chunk, op.step))
        if known is None:
            sizes = tuple([self.size(v) for v in part.writes])
            known = self.written[op.chunk, op.step] = sizes, sum(sizes)
        self.nbytes.update(zip(part.writes, known[0], strict=True))
        self.total += known[1]

    def free(self, values: Sequence[str], index: int, instr: Instr) -> None:
        try:
            self.total -= sum(map(self.nbytes.pop, values))
        except KeyError as e:
            lost = f"frees {e.args[0]}, which is not alive there"
            raise PlanError(f"role {self.role}, instruction {index} {instr.name}: {lost}") from None

    def size(self, value: str) -> int:
        """Bytes of a value. Microbatches share specs: objects that the plan keeps alive."""
        spec, _ = self.kinds[value]
        size = self.sizes.get(id(spec), -1)
        if size < 0:
            size = self.sizes[id(spec)] = bind(spec.nbytes, 0)
        return size

    def held(self, part: Part) -> int:
        """`part_peak`; for a chunk's step once for all microbatches in which the same inputs die."""
        op, dying = part.op, part.frees
        if not isinstance(op, Compute):
            return part_peak(self.plan, part, self.nbytes)
        key = (op.chunk, op.step, tuple([v in dying for v in part.reads]) if dying else ())
        if key not in self.above:
            self.above[key] = part_peak(self.plan, part, self.nbytes)
        return self.above[key]


class _Scan(_Totals):
    """What is alive, by category; constant time per value. `before`: goes on where that stands."""

    def __init__(self, plan: Plan, role: RolePlan, before: _Totals | None = None) -> None:
        self.live: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        for state in role.states:
            self.live[state.category] += state.nbytes
        super().__init__(plan, role, () if before is not None else role.allocs_first)
        if before is not None:
            self.sizes = before.sizes
            self.allocate(before.nbytes)

    def fullest(self, index: int, instr: Instr) -> Usage:
        """Run an instruction; its fullest moment."""
        self.free(instr.frees_before, index, instr)
        most: Usage | None = None
        for part in instr.parts:
            before = self.total
            self.write(part)
            total = before + self.held(part)
            if most is None or total > most.total:
                most = Usage(index, total, self._split_at(total, part))
            self.free(part.frees, index, instr)
        self.allocate(instr.allocs_after)
        return most if most is not None and most.total >= self.total else Usage(index, self.total, self.split())

    def allocate(self, values: Iterable[str]) -> None:
        super().allocate(values)
        for v in values:
            self.live[self.kinds[v][1]] += self.nbytes[v]

    def write(self, part: Part) -> None:
        self.allocate(part.writes)

    def free(self, values: Sequence[str], index: int, instr: Instr) -> None:
        for v in values:
            self.live[self.kinds[v][1]] -= self.nbytes.get(v, 0)
        super().free(values, index, instr)

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
            live[self.kinds[v][1]] -= early
            gone -= early
        return {c: b for c, b in live.items() if b}
