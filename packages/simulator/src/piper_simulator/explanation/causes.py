"""Attribute time on the critical path to causes that can be summed over microbatches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from piper_ir.fold.timing import Prepared
from piper_ir.plan.phases import instr_label
from piper_ir.plan.plan import Instr, Plan, RolePlan
from piper_ir.program.ops import COMM, Compute
from piper_simulator.explanation.critical import PathPiece

CauseKind = Literal["compute", "communication", "host"]


@dataclass(frozen=True, slots=True)
class Cause:
    """Name a cause of delay.

    Attributes:
        what: of compute the phase, or the class of an op without one; of communication the purpose of its channel.
        where: of compute the stage ("stage 0", "stages 0 and 7" of an overlapped pair; its role if there are none), of
            communication the channel, of a host its role.
    """

    kind: CauseKind
    what: str
    where: str

    @property
    def text(self) -> str:
        match self.kind:
            case "compute":
                return f"{self.what} of {self.where}"
            case "communication":
                return f"{self.what} over {self.where}"
            case _:
                return f"host of {self.where}"


class Causes:
    """Name the cause of each node of a plan."""

    def __init__(self, plan: Plan, prepared: Prepared) -> None:
        self._plan, self._prepared = plan, prepared
        self._known: dict[int, Cause] = {}

    def at(self, node: int) -> tuple[RolePlan, Instr]:
        """Return the role and the instruction of a node."""
        r = bisect_right(self._prepared.offsets, node) - 1
        role = self._plan.roles[r]
        return role, role.program[node - self._prepared.offsets[r]]

    def of_node(self, node: int) -> Cause:
        if node not in self._known:
            self._known[node] = self._owner(node)
        return self._known[node]

    def _owner(self, node: int) -> Cause:
        role, instr = self.at(node)
        op = instr.parts[0].op
        if isinstance(op, COMM):
            channel = self._plan.channel(op.channel)
            return Cause("communication", channel.purpose, channel.id)
        phase = instr_label(instr).phase
        if phase in ("other", "fold"):
            return Cause("compute", type(op).__name__, role.role)
        stages = {
            self._plan.chunk(p.op.chunk).coords.get("stage")
            for p in instr.parts
            if isinstance(p.op, Compute)
        }
        numbers = sorted(s for s in stages if s is not None)
        where = (
            f"stage{'s' if len(numbers) > 1 else ''} {' and '.join(map(str, numbers))}"
            if numbers
            else role.role
        )
        return Cause("compute", phase, where)

    def of_piece(self, piece: PathPiece) -> Cause:
        return (
            Cause("host", "issue", self.at(piece.node)[0].role)
            if piece.holder == "host"
            else self.of_node(piece.node)
        )

    def totals(self, pieces: Iterable[PathPiece]) -> Mapping[Cause, float]:
        """Return the seconds of pieces by cause, most first."""
        seconds_by_cause: dict[Cause, float] = {}
        for piece in pieces:
            owner = self.of_piece(piece)
            seconds_by_cause[owner] = seconds_by_cause.get(owner, 0.0) + piece.seconds
        return dict(sorted(seconds_by_cause.items(), key=lambda x: -x[1]))
