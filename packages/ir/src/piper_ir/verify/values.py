"""Check rules R11 to R16 and R29: the life of every value, by the guarantees of streams and waits within a role."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from piper_ir.plan.plan import COMPUTE, Instr, RolePlan
from piper_ir.program.ops import Collective
from piper_ir.verify.columns import LAST, AllBefore, HappensBefore
from piper_ir.verify.rules import Findings, instr_title
from piper_ir.verify.settled import unsettled

UsePosition = tuple[int, int]
"""An instruction and a part of it: part -1 stands for its frees before its parts, LAST for its allocs after them."""
FIRST: UsePosition = (-1, LAST)
"""The position before the first instruction of a step."""


@dataclass(slots=True)
class _Life:
    """Hold where a role allocates (by itself, not by writing), writes, reads and frees one value."""

    allocs: list[UsePosition] = field(default_factory=list)
    writes: list[UsePosition] = field(default_factory=list)
    reads: list[UsePosition] = field(default_factory=list)
    frees: list[UsePosition] = field(default_factory=list)

    def places(self) -> Iterator[UsePosition]:
        """Yield where the role uses the value, the writes first."""
        for places in (self.writes, self.reads, self.allocs, self.frees):
            yield from places


def check_values(findings: Findings, orders: dict[str, HappensBefore]) -> None:
    """Check R11 to R16 and R29 on plans whose form is right."""
    columns, roles = findings.columns, findings.plan.roles
    wanted = unsettled(columns, AllBefore([orders[role.role] for role in roles]))
    names = set(map(columns.table.name, wanted))
    home: dict[str, str] = {}
    lives = {role.role: _lives(role, names) for role in roles}
    for role in roles:
        for value, life in lives[role.role].items():
            if life.writes:
                _check_writers(findings, role, value, life, home)
    for value in findings.unwritten:
        findings.add("R11-written-once", f"nothing writes {value}")
    for role in roles:
        order = orders[role.role]
        for value, life in lives[role.role].items():
            if home.get(value) == role.role:
                _Lifetime(findings, role, order, value, life).check()
            elif value in home:
                index = max(0, next(life.places())[0])
                findings.add(
                    "R11-written-once",
                    f"it uses {value}, which lives on role {home[value]}",
                    role,
                    index,
                )


def _lives(role: RolePlan, wanted: set[str]) -> dict[str, _Life]:
    """Return the lives of some values, in the order in which the role first names them."""
    lives: dict[str, _Life] = {}
    if not wanted:
        return lives

    def of(values: Iterable[str]) -> Iterator[_Life]:
        for value in values:
            if value in wanted:
                life = lives.get(value)
                if life is None:
                    life = lives[value] = _Life()
                yield life

    for life in of(role.allocs_first):
        life.allocs.append(FIRST)
    for i, instr in enumerate(role.program):
        for life in of(instr.frees_before) if instr.frees_before else ():
            life.frees.append((i, -1))
        for p, part in enumerate(instr.parts):
            for life in of((*part.reads, *part.held)):
                life.reads.append((i, p))
            for life in of(part.writes):
                life.writes.append((i, p))
            for life in of(part.frees):
                life.frees.append((i, p))
        for life in of(instr.allocs_after) if instr.allocs_after else ():
            life.allocs.append((i, LAST))
    return lives


def _check_writers(
    findings: Findings, role: RolePlan, value: str, life: _Life, home: dict[str, str]
) -> None:
    first = life.writes[0]
    if value in home and home[value] != role.role:
        findings.add(
            "R11-written-once",
            f"it writes {value}, which role {home[value]} writes too",
            role,
            first[0],
        )
    elif len(life.writes) > 1:
        findings.add(
            "R11-written-once",
            f"it writes {value}, which instruction {first[0]} writes too",
            role,
            life.writes[1][0],
        )
    home.setdefault(value, role.role)


class _Lifetime:
    """Check R12 to R16 and R29 for one value on the role that writes it."""

    def __init__(
        self, findings: Findings, role: RolePlan, order: HappensBefore, value: str, life: _Life
    ) -> None:
        self.findings, self.role, self.order, self.value, self.life = (
            findings,
            role,
            order,
            value,
            life,
        )
        self.writer = life.writes[0]

    def add(self, rule: str, message: str, index: int) -> None:
        """Add a violation at an instruction of the role."""
        self.findings.add(rule, message, self.role, index)

    def instr(self, place: UsePosition) -> Instr:
        return self.role.program[place[0]]

    def says(self, place: UsePosition) -> str:
        """Return the text of a position in messages."""
        if place == FIRST:
            return "the start of the step"
        return (
            f"instruction {place[0]} ({self.instr(place).stream}: {instr_title(self.instr(place))})"
        )

    def check(self) -> None:
        """Add every violation of the value's life."""
        self._check_allocation()
        read_in_order = all([self._check_read(place) for place in self.life.reads])
        if read_in_order and len(self.life.reads) > 1:
            self._check_spoiled()
        if not self.life.frees:
            self.add(
                "R14-freed-once", f"{self.value} is written here and never freed", self.writer[0]
            )
            return
        if len(self.life.frees) > 1:
            again = self.life.frees[1]
            self.add(
                "R14-freed-once",
                f"it frees {self.value}, which {self.says(self.life.frees[0])} frees too",
                again[0],
            )
            return
        if read_in_order:  # else a use that is out of order would be reported again for the free that follows from it
            for use in (self.writer, *self.life.reads):
                if not self._check_use_before_free(use, self.life.frees[0]):
                    break

    def _check_allocation(self) -> None:
        allocs, index = self.life.allocs, self.writer[0]
        if not self.instr(self.writer).comm:
            if allocs:
                self.add(
                    "R12-allocated",
                    f"{self.value} is allocated by the part that writes it, and by {self.says(allocs[0])} too",
                    index,
                )
            return
        if len(allocs) != 1:
            self.add(
                "R12-allocated",
                f"the buffer of {self.value} is allocated {len(allocs)} times; once is expected",
                index,
            )
        elif allocs[0] != FIRST and not self.order.precedes(allocs[0][0], index):
            message = (
                f"the buffer of {self.value} is made by {self.says(allocs[0])}; it must stand "
                f"before, and be waited for"
            )
            self.add("R12-allocated", message, index)

    def _check_read(self, place: UsePosition) -> bool:
        w = self.writer
        ok = w < place if w[0] == place[0] else self.order.precedes(w[0], place[0])
        if not ok:
            why = "only later" if w >= place else "and no wait makes this instruction come after it"
            self.add(
                "R13-read-after-write",
                f"it reads {self.value}, which {self.says(w)} writes {why}",
                place[0],
            )
        return ok

    def _check_spoiled(self) -> None:
        """Check that no other part reads a value that a collective leaves undefined, unless it comes before it."""
        for place in self.life.reads:
            op = self.instr(place).parts[place[1]].op
            if isinstance(op, Collective) and op.law.spoils:
                late = next(
                    (
                        r
                        for r in self.life.reads
                        if r != place and not self.order.precedes(r[0], place[0])
                    ),
                    None,
                )
                if late is not None:
                    message = f"{self.value} is undefined after {op.law.name}, and {self.says(late)} may read it then"
                    self.add("R29-spoiled", message, place[0])

    def _check_use_before_free(self, use: UsePosition, free: UsePosition) -> bool:
        if use[0] > free[0] or (use[0] == free[0] and use[1] > free[1]):
            self.add(
                "R15-use-after-free",
                f"it uses {self.value}, which {self.says(free)} frees before",
                use[0],
            )
            return False
        if (
            use[0] != free[0]
            and self.instr(use).stream != COMPUTE
            and not self.order.precedes(use[0], free[0])
        ):
            message = (
                f"it frees {self.value} without having waited for {self.says(use)}, which uses it"
            )
            self.add("R16-free-covered", message, free[0])
            return False
        return True
