"""Describe a span: its phase, its microbatch, and the chunk of its device to which it belongs.

Phase and microbatch are taken from the plan if there is one, else guessed from the span's name; only the plan knows the
chunk.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import cast

from piper_ir.ground.trace import BATCH, Span, Trace
from piper_ir.plan.phases import InstrLabel, Phase, instr_label
from piper_ir.plan.plan import COMPUTE, Instr, Plan
from piper_ir.program.ops import Compute

_COMMUNICATION: Mapping[str, Phase] = {"gather": "gather", "scatter": "scatter"}
"""The phases of communication by the first word of its name."""
_PREFIXES: Sequence[tuple[tuple[str, ...], tuple[bool, ...], Phase]] = (
    (("update",), (False, True), "U"),
    (("load",), (True,), "F"),  # a chunk's forward, fused with the loading of its batch
    (("seed",), (True,), "B"),
    (("fresh.", "fold."), (False,), "fold"),
)
"""The phases of compute by how its name begins, and whether it is fused with anything."""
_NAME = re.compile(r"(?:\.(?P<step>[FBRIW]))?@(?P<mb>\d+)")


def kinds(trace: Trace, plan: Plan | None = None) -> dict[Span, InstrLabel]:
    """Return the label of every span.

    Without a plan a span's name decides: an input gradient that is fused with anything counts as B.
    """
    waits = {s: _guess(s) for s in trace.waits}
    if plan is None:
        return {s: _guess(s) for s in trace.spans} | waits
    known = {(role.role, index): instr_label(instr) for role, index, instr in plan.instructions()}
    role_of = {rank: role.role for role in plan.roles for rank in role.ranks}
    return {s: known[role_of[s.rank], s.instr] for s in trace.spans} | waits


def _guess(span: Span) -> InstrLabel:
    matched = _NAME.search(span.name)
    phase = _guess_phase(span, cast(Phase | None, matched["step"]) if matched else None)
    return InstrLabel(((phase, int(matched["mb"]) if matched and phase != "U" else -1),))


def _guess_phase(span: Span, step: Phase | None) -> Phase:
    """Return the phase of a span by its stream and its name, which has the letter of its step or none."""
    if span.stream == BATCH:
        return "batch"
    if span.stream != COMPUTE:
        return _COMMUNICATION.get(span.name.partition(".")[0], "comm")
    fused = "+" in span.name
    for prefixes, where, phase in _PREFIXES:
        if span.name.startswith(prefixes) and fused in where:
            return phase
    return "B" if fused and step in ("R", "I") else step or "other"


def chunks_of(plan: Plan) -> dict[str, list[int]]:
    """Return for each role the stages that it computes, ascending: its chunks."""
    chunks_by_role = {}
    for role in plan.roles:
        stages = {
            _stage(plan, instr, forward) for instr in role.program for forward in (True, False)
        }
        chunks_by_role[role.role] = sorted(stage for stage in stages if stage is not None)
    return chunks_by_role


def chunk_numbers(
    work: Mapping[Span, InstrLabel], plan: Plan, chunks: Mapping[str, list[int]]
) -> dict[Span, tuple[int | None, ...]]:
    """Return for each half of an instruction the index of its stage among its role's `chunks`, or None without one."""
    numbers = {}
    for span, kind in work.items():
        role = plan.role_of(span.rank)
        stages = [_stage(plan, role.program[span.instr], phase == "F") for phase, _ in kind.halves]
        numbers[span] = tuple(
            [None if stage is None else chunks[role.role].index(stage) for stage in stages]
        )
    return numbers


def _stage(plan: Plan, instr: Instr, forward: bool) -> int | None:
    """Return the stage of an instruction's first part of one direction; None if there is none."""
    for part in instr.parts:
        if isinstance(part.op, Compute) and (part.op.step == "F") == forward:
            stage = plan.chunk(part.op.chunk).coords.get("stage")
            return stage if isinstance(stage, int) else None
    return None
