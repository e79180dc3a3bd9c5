"""A deliberate mistake of a runtime: another binding of some parts of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from piper_ir.plan.plan import Instr, Part
from piper_runtime.rank.binding.parts import Operand, Thunk
from piper_runtime.rank.binding.rank import Binder
from piper_runtime.rank.binding.rank_state import RankState

BindPart = Callable[[Part, RankState], "Thunk"]
BindOperand = Callable[[Part, RankState], "Operand"]


@dataclass(frozen=True)
class Fault:
    """`part`, `operand` and `instr` replace the binding of a computing part, of a communication's tensor, and of an
    instruction."""

    about: str
    part: Callable[[Part, RankState, BindPart], Thunk] | None = None
    operand: Callable[[Part, RankState, BindOperand], Operand] | None = None
    instr: Callable[[Instr, RankState], Instr] | None = None

    def binder(self, correct: Binder) -> Binder:
        """Return a binder with this mistake, and else as the correct one."""
        part, operand = self.part, self.operand
        return Binder(
            correct.part if part is None else lambda p, rank: part(p, rank, correct.part),
            correct.operand
            if operand is None
            else lambda p, rank: operand(p, rank, correct.operand),
            self.instr or correct.instr,
        )
