"""Find quickly the values that keep R11 to R16 and R29, as nearly all do; `values` looks at the others one by one."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from piper_ir.plan.plan import COMPUTE, Instr, Part, RolePlan
from piper_ir.program.ops import Collective
from piper_ir.verify.happens_before import HappensBefore

Sorted = tuple[set[str], set[str]]
"""The values of a role that keep the rules for sure, and the others."""


def settled_values(
    roles: Sequence[RolePlan], orders: Mapping[str, HappensBefore]
) -> dict[str, Sorted]:
    """Return, by role, the values that keep the rules and that no other role touches, and the others that it names."""
    sorted_by_role: dict[str, Sorted] = {}
    seen, shared = set[str](), set[str]()
    for role in roles:
        good, others = _plain(role)
        walk = _Walk(orders[role.role], others)
        walk.follow(role)
        confirmed = walk.settled()
        good |= confirmed
        others -= confirmed
        for values in (good, others):
            shared |= seen & values
        seen.update(good, others)
        sorted_by_role[role.role] = good, others
    for good, others in sorted_by_role.values() if shared else ():
        others |= good & shared
        good -= shared
    return sorted_by_role


def _plain(role: RolePlan) -> tuple[set[str], set[str]]:
    """Return the values of a role that are simple by its own instructions, and the others; sets are used for speed."""
    others, alive, freed = set(role.allocs_first), set[str](), set[str]()
    for instr in role.program:
        others.update(instr.frees_before, instr.allocs_after)
        for part in instr.parts:
            if instr.stream != COMPUTE:
                others.update(part.reads, part.writes, part.frees, part.held)
                continue
            if not alive.issuperset(part.reads):
                others.update([v for v in part.reads if v not in alive])
            others.update(part.held)
            if not freed.isdisjoint(part.writes):
                others.update(part.writes)
            before = len(alive)
            alive.update(part.writes)
            if len(alive) != before + len(part.writes):
                others.update(part.writes)
            if part.frees:
                before = len(alive)
                alive.difference_update(part.frees)
                if len(alive) != before - len(part.frees):
                    others.update(part.frees)
                freed.update(part.frees)
    others |= alive
    return freed - others, others


class _Walk:
    """Follow some values of a role through its program, and keep the ones used in an ordinary way.

    Each is allocated once if communication writes it, written once, read afterwards, by at most one communication, and
    freed once, at last, by an instruction that has waited for all of that.
    """

    def __init__(self, order: HappensBefore, mine: Container[str]) -> None:
        self._order, self._mine = order, mine
        self._allocated: dict[str, int] = {}
        self._written: dict[str, int] = {}  # values that are alive, by where
        self._computed: dict[str, int] = {}  # where compute read a value last
        self._carried: dict[str, int] = {}  # which communication wrote a value
        self._sent: dict[str, int] = {}  # which communication reads a value
        self._spoiled: set[str] = set()
        self._freed: set[str] = set()
        self._odd: set[str] = set()

    def settled(self) -> set[str]:
        """Return the values that keep the rules."""
        return self._freed - self._odd

    def follow(self, role: RolePlan) -> None:
        """Take all instructions in program order."""
        self._allocate(role.allocs_first, -1)
        for i, instr in enumerate(role.program):
            if instr.stream == COMPUTE:
                self._compute(instr, i)
            else:
                self._communicate(instr, i)

    def _compute(self, instr: Instr, i: int) -> None:
        mine = self._mine
        self._free(instr.frees_before, i)
        for part in instr.parts:
            self._read([v for v in part.reads if v in mine], i)
            self._read(part.held, i)
            for v in part.writes:
                if v in mine:
                    if v in self._allocated or v in self._written or v in self._freed:
                        self._odd.add(v)
                    self._written[v] = i
            self._free([v for v in part.frees if v in mine], i)
        self._allocate(instr.allocs_after, i)

    def _communicate(self, instr: Instr, i: int) -> None:
        self._odd.update(instr.frees_before, instr.allocs_after)
        for part in instr.parts:
            self._odd.update(part.frees, part.held)
            for v in part.reads:
                self._send(v, part, i)
            for v in part.writes:
                at = self._allocated.get(v)
                if (
                    at is None
                    or v in self._written
                    or v in self._freed
                    or not (at < 0 or self._order.precedes(at, i))
                ):
                    self._odd.add(v)
                self._written[v] = self._carried[v] = i

    def _read(self, values: Iterable[str], i: int) -> None:
        for v in values:
            at = self._written.get(v)
            if at is None or v in self._spoiled or not (at == i or self._order.precedes(at, i)):
                self._odd.add(v)
            self._computed[v] = i

    def _send(self, v: str, part: Part, i: int) -> None:
        at = self._written.get(v)
        if at is None or v in self._sent or not self._order.precedes(at, i):
            self._odd.add(v)
        self._sent[v] = i
        if isinstance(part.op, Collective) and part.op.law.spoils:
            last = self._computed.get(
                v
            )  # who has waited for this has waited for all that compute read before
            if last is not None and not self._order.precedes(last, i):
                self._odd.add(v)
            self._spoiled.add(v)

    def _free(self, values: Iterable[str], i: int) -> None:
        for v in values:
            if self._written.pop(v, None) is None:
                self._odd.add(v)
            for communication in (self._carried.get(v), self._sent.get(v)):
                if communication is not None and not self._order.precedes(communication, i):
                    self._odd.add(v)
            self._freed.add(v)

    def _allocate(self, values: Iterable[str], i: int) -> None:
        for v in values:
            if v in self._allocated or v in self._written or v in self._freed:
                self._odd.add(v)
            self._allocated[v] = i
