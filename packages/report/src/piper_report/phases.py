"""What a span is: its phase and microbatch, taken from the plan where that is at hand, else guessed from the span's name."""

from __future__ import annotations

import re

from piper_ir.phases import Kind, of_instr
from piper_ir.plan import COMPUTE, Plan
from piper_ir.trace import Span, Trace

_NAME = re.compile(r"(?:\.(?P<step>[FBIW]))?@(?P<mb>\d+)")


def kinds(trace: Trace, plan: Plan | None = None) -> dict[Span, Kind]:
    """The kind of every span. Without a plan a span's name decides: an input gradient that is fused with anything counts as B."""
    if plan is None:
        return {s: _guess(s) for s in trace.spans}
    known = {(role.role, index): of_instr(instr) for role, index, instr in plan.instructions()}
    role_of = {rank: role.role for role in plan.roles for rank in role.ranks}
    return {s: known[role_of[s.rank], s.instr] for s in trace.spans}


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
