"""Describe the spans and the memory of one step, simulated or executed; every executor writes such a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

TRACE_VERSION = 1
BATCH = "batch"
"""The stream of spans in which a rank waits for Job.batch. No plan has such a stream, and their time is no compute."""
BUSY_MACHINE = "busy machine"
"""The topic of the note which says that ranks of a run waited for cores."""

Source = Literal["measured", "table", "interpolated", "formula", "given"]
"""The source of a duration.

It was measured in this run, looked up in a table, interpolated, computed by a formula, or given by a synthetic program.
"""


@dataclass(frozen=True, slots=True)
class Span:
    """Say when one instruction ran on one rank; all times are in seconds since the start of the step.

    Attributes:
        instr: its index in the program of the rank's role.
        ready: when it could have started, had its stream and its peers been free.
        bytes: bytes that a communication moved; of compute, the messages inside of its steps.
        inside_s: seconds of the messages inside of its steps, if they are known.
    """

    rank: int
    stream: str
    instr: int
    name: str
    start: float
    end: float
    ready: float = 0.0
    bytes: int = 0
    flops: int = 0
    source: Source = "measured"
    inside_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MemSample:
    """Say how many bytes one rank held at the fullest moment of an instruction.

    Attributes:
        instr: the instruction's index in the program of the rank's role.
        time: when the instruction started, in seconds since the start of the step.
        bytes: bytes by category. A simulation has the categories of `piper_ir.plan.plan.Category`. A run has one
            category, "measured": the sum of all live storages, counted in the first step (if counting was asked for)
            and shown at the times of the step that the trace is of.
    """

    rank: int
    instr: int
    time: float
    bytes: Mapping[str, int]


@dataclass(frozen=True)
class Trace:
    """Hold the spans and the memory of one step of a plan.

    Attributes:
        kind: whether the step was simulated or executed.
        losses: the losses of the step; empty for a simulation.
        step: the number of the step, counted from 0.
        notes: remarks for a reader, by topic.
        waits: waits for Job.batch, on the stream BATCH, each with the instruction that it held up.
        alike: ranks with the same spans and samples; only the first of them has these. Empty if every rank has its own.
        version: the version of the file format.
    """

    plan_key: str
    kind: Literal["simulated", "executed"]
    spans: tuple[Span, ...]
    memory: tuple[MemSample, ...] = ()
    losses: tuple[float, ...] = ()
    step: int = 0
    notes: Mapping[str, str] = field(default_factory=dict)
    waits: tuple[Span, ...] = ()
    alike: tuple[tuple[int, ...], ...] = ()
    version: int = TRACE_VERSION

    def shown_as(self) -> dict[int, int]:
        """Return for each rank without spans of its own the rank whose spans it shares."""
        return {rank: ranks[0] for ranks in self.alike for rank in ranks[1:]}
