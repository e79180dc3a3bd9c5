"""What a span is: its phase and microbatch, taken from the plan where that is at hand, else guessed from the span's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from piper_ir.ops import Compute, Update
from piper_ir.plan import COMPUTE, Instr, Plan
from piper_ir.trace import Span, Trace

Phase = Literal["F", "B", "I", "W", "pair", "U", "other", "comm"]
PHASES: Mapping[Phase, str] = {
    "F": "forward",
    "B": "backward (I and W together)",
    "I": "input gradient",
    "W": "weight gradient",
    "pair": "overlapped pair",
    "U": "optimizer update",
    "other": "other (gradient norm, sums)",
    "comm": "communication",
}
_NAME = re.compile(r"(?:\.(?P<step>[FBIW]))?@(?P<mb>\d+)")


@dataclass(frozen=True, slots=True)
class Kind:
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
        letters = {"comm": "", "other": ""}
        return "&".join(letters.get(p, p) + (str(mb) if mb >= 0 else "") for p, mb in self.halves)


def kinds(trace: Trace, plan: Plan | None = None) -> dict[Span, Kind]:
    """The kind of every span. Without a plan a span's name decides: an input gradient that is fused with anything counts as B."""
    if plan is None:
        return {s: _guess(s) for s in trace.spans}
    known = {(role.role, index): of_instr(instr) for role, index, instr in plan.instructions()}
    role_of = {rank: role.role for role in plan.roles for rank in role.ranks}
    return {s: known[role_of[s.rank], s.instr] for s in trace.spans}


def of_instr(instr: Instr) -> Kind:
    """The kind of an instruction of a plan, from its parts."""
    first = next((p.mb for p in instr.parts if p.mb >= 0), -1)
    if instr.comm:
        return Kind((("comm", first),))
    steps: dict[tuple[bool, int], set[str]] = {}
    for part in instr.parts:
        if isinstance(part.op, Compute):
            steps.setdefault((part.op.step != "F", part.mb), set()).add(part.op.step)
    if not steps:
        update = any(isinstance(p.op, Update) for p in instr.parts)
        return Kind(((("U", -1) if update else ("other", first)),))
    halves = {backward: (_joined(found), mb) for (backward, mb), found in reversed(steps.items())}  # the first microbatch of each
    return Kind(tuple(halves[b] for b in sorted(halves)))


def _joined(steps: set[str]) -> Phase:
    if "F" in steps:
        return "F"
    if steps == {"I"}:
        return "I"
    return "W" if steps == {"W"} else "B"


def _guess(span: Span) -> Kind:
    found = _NAME.search(span.name)
    mb = int(found["mb"]) if found else -1
    if span.stream != COMPUTE:
        return Kind((("comm", mb),))
    if span.name.startswith("update"):
        return Kind((("U", -1),))
    if span.name.startswith("load") and "+" in span.name:  # a chunk's forward, fused with the loading of its batch
        return Kind((("F", mb),))
    if span.name.startswith("seed") and "+" in span.name:
        return Kind((("B", mb),))
    match found["step"] if found else None:
        case "I":
            return Kind((("B" if "+" in span.name else "I", mb),))
        case "F":
            return Kind((("F", mb),))
        case "B":
            return Kind((("B", mb),))
        case "W":
            return Kind((("W", mb),))
    return Kind((("other", mb),))
