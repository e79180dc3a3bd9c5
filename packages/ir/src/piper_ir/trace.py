"""Trace: what happened in one step, simulated or executed. Every executor writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

TRACE_VERSION = 1
BATCH = "batch"
"""The stream of spans in which a rank waits for Job.batch. No plan has such a stream, and their time is no compute."""

Source = Literal["measured", "table", "interpolated", "formula", "given"]
"""Where a duration comes from: measured in this run, looked up, interpolated, computed, or given in a synthetic program."""


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction on one rank. Seconds since the start of the step. `instr` indexes the role's program; `ready` is when the
    instruction could have started had its stream and its peers been free; `bytes` moved by a communication, `flops` done by
    compute."""

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


@dataclass(frozen=True, slots=True)
class MemSample:
    """Bytes by category on one rank at the peak moment of an instruction's run; `time` in seconds, the instruction's start.
    Simulated: categories of `piper_ir.plan.Category`. Executed: one category "measured", the sum of all live storages, counted
    in the first step (where counting was asked for) and shown at the times of the step that the trace is of."""

    rank: int
    instr: int
    time: float
    bytes: Mapping[str, int]


@dataclass(frozen=True)
class Trace:
    """`plan_key` says which plan; `step` counts from 0; `losses` is empty for a simulation. `spans` are of instructions; `waits`
    on the stream BATCH, of calls of Job.batch, each with the instruction that it held up."""

    plan_key: str
    kind: Literal["simulated", "executed"]
    spans: tuple[Span, ...]
    memory: tuple[MemSample, ...] = ()
    losses: tuple[float, ...] = ()
    step: int = 0
    notes: Mapping[str, str] = field(default_factory=dict)
    waits: tuple[Span, ...] = ()
    version: int = TRACE_VERSION
