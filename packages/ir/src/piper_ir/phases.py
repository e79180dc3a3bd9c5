"""What an instruction is: its phase and microbatch, as people call them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from piper_ir.ops import Compute, Update
from piper_ir.plan import Instr

Phase = Literal["F", "B", "I", "W", "pair", "U", "other", "comm", "batch"]
PHASES: Mapping[Phase, str] = {
    "F": "forward",
    "B": "backward (I and W together)",
    "I": "input gradient",
    "W": "weight gradient",
    "pair": "overlapped pair",
    "U": "optimizer update",
    "other": "other (gradient norm, sums)",
    "comm": "communication",
    "batch": "waiting for the batch",
}


@dataclass(frozen=True, slots=True)
class InstrLabel:
    """Of an instruction: `halves` are its phases with their microbatches (-1 for ops of the whole step); two of them when it is
    an overlapped pair, the forward one first."""

    halves: tuple[tuple[Phase, int], ...]

    @property
    def phase(self) -> Phase:
        return self.halves[0][0] if len(self.halves) == 1 else "pair"

    @property
    def mb(self) -> int:
        return self.halves[0][1]

    @property
    def label(self) -> str:
        """As in "F3", "U", "F3&B1"; "" for what has no letter."""
        letters = {"comm": "", "other": "", "batch": ""}
        return "&".join(letters.get(p, p) + (str(mb) if mb >= 0 else "") for p, mb in self.halves)


def instr_label(instr: Instr) -> InstrLabel:
    """The kind of an instruction of a plan, from its parts."""
    first = next((p.mb for p in instr.parts if p.mb >= 0), -1)
    if instr.comm:
        return InstrLabel((("comm", first),))
    steps: dict[tuple[bool, int], set[str]] = {}
    for part in instr.parts:
        if isinstance(part.op, Compute):
            steps.setdefault((part.op.step != "F", part.mb), set()).add(part.op.step)
    if not steps:
        update = any(isinstance(p.op, Update) for p in instr.parts)
        return InstrLabel(((("U", -1) if update else ("other", first)),))
    halves = {backward: (_joined(found), mb) for (backward, mb), found in reversed(steps.items())}  # the first microbatch of each
    return InstrLabel(tuple(halves[b] for b in sorted(halves)))


def _joined(steps: set[str]) -> Phase:
    if "F" in steps:
        return "F"
    if steps == {"I"}:
        return "I"
    return "W" if steps == {"W"} else "B"
