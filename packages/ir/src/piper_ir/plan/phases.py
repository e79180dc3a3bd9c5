"""Name instructions as people do, by phase and microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from piper_ir.plan.plan import Instr
from piper_ir.program.ops import KEEP_ALL, Cast, Collective, Compute, Fold, Fresh, Update

Phase = Literal[
    "F", "B", "R", "I", "W", "pair", "U", "fold", "other", "gather", "scatter", "comm", "batch"
]
PHASES: Mapping[Phase, str] = {
    "F": "forward",
    "B": "backward (I and W together)",
    "R": "recomputation",
    "I": "input gradient",
    "W": "weight gradient",
    "pair": "overlapped pair",
    "U": "optimizer update",
    "fold": "gradient buffer or its fold",
    "other": "other (gradient norm, sums)",
    "gather": "gather of parameters",
    "scatter": "reduce-scatter of gradients",
    "comm": "communication",
    "batch": "waiting for the batch",
}


@dataclass(frozen=True, slots=True)
class InstrLabel:
    """Label an instruction.

    Attributes:
        halves: its phases with their microbatches (-1 for ops of the whole step). An overlapped pair has two, the
            forward one first; everything else has one.
        again: whether a backward begins with recomputation.
    """

    halves: tuple[tuple[Phase, int], ...]
    again: bool = False

    @property
    def phase(self) -> Phase:
        """Return the phase of an instruction that has one, "pair" for two."""
        return self.halves[0][0] if len(self.halves) == 1 else "pair"

    @property
    def mb(self) -> int:
        """Return the microbatch of the first half."""
        return self.halves[0][1]

    @property
    def label(self) -> str:
        """Return a short text such as "F3", "U" or "F3&B1"; "" for an instruction without a letter."""
        return "&".join(
            ("" if p in _UNNAMED else p) + (str(mb) if mb >= 0 else "") for p, mb in self.halves
        )


_UNNAMED = ("fold", "other", "gather", "scatter", "comm", "batch")
"""The phases without a letter."""
_SHARED: Mapping[str, Phase] = {"all_gather": "gather", "reduce_scatter": "scatter"}
"""The phases of the collectives on sharded buckets."""


def instr_label(instr: Instr) -> InstrLabel:
    """Return the label of an instruction of a plan, from its parts."""
    first = next((p.mb for p in instr.parts if p.mb >= 0), -1)
    if instr.comm:
        op = instr.parts[0].op
        return InstrLabel(
            ((_SHARED.get(op.kind, "comm") if isinstance(op, Collective) else "comm", first),)
        )
    steps: dict[tuple[bool, int], set[str]] = {}
    for part in instr.parts:
        if isinstance(part.op, Compute):
            steps.setdefault((part.op.step != "F", part.mb), set()).add(part.op.step)
    if not steps:
        return InstrLabel((_beside(instr, first),))
    # Reversed, so that the first microbatch of each direction is kept.
    halves = {
        backward: (_joined(steps_there), mb)
        for (backward, mb), steps_there in reversed(steps.items())
    }
    again = any("R" in step_set and len(step_set) > 1 for step_set in steps.values()) or any(
        isinstance(p.op, Compute) and p.op.step == "B" and p.op.keep != KEEP_ALL
        for p in instr.parts
    )
    return InstrLabel(tuple(halves[b] for b in sorted(halves)), again)


def _beside(instr: Instr, mb: int) -> tuple[Phase, int]:
    """Return the phase and microbatch of an instruction that runs no chunk."""
    if any(isinstance(p.op, Update) for p in instr.parts):
        return "U", -1
    on_gradients = all(isinstance(p.op, Fold | Fresh | Cast) for p in instr.parts)
    return ("fold" if on_gradients else "other"), mb


def _joined(steps: set[str]) -> Phase:
    if "F" in steps:
        return "F"
    if steps == {"R"}:
        return "R"
    own = steps - {"R"}  # which a backward may begin with
    if own == {"I"}:
        return "I"
    return "W" if own == {"W"} else "B"
