"""Make the trace that every executor writes from measured spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from piper_ir.ground.sizes import bind
from piper_ir.ground.trace import BATCH, MemSample, Span, Trace
from piper_ir.plan.plan import COMPUTE, Instr, Plan
from piper_ir.plan.plan_bytes import PlanBytes
from piper_ir.program.ops import COMM, Compute, Load
from piper_runtime.engine.memory import MemoryPoint

TimedSpan = tuple[int, float, float]
"""The index of an instruction, with its start and end in seconds on the machine-wide clock of time.perf_counter."""
Wait = tuple[int, float, float]
"""The microbatch that a rank waited for Job.batch to make, with start and end on the same clock."""
MEASURED_BYTES = "measured"
"""The category of measured memory: a counter of storages cannot tell a parameter from an activation."""


@dataclass(frozen=True)
class StepMeasurements:
    """Hold the measurements of a step, by rank.

    Attributes:
        spans: the spans of its instructions.
        memory: the bytes alive in its instructions.
        waits: the waits for Job.batch; their time is no compute.
    """

    spans: Mapping[int, Sequence[TimedSpan]]
    memory: Mapping[int, Sequence[MemoryPoint]] = field(default_factory=dict)
    waits: Mapping[int, Sequence[Wait]] = field(default_factory=dict)


def executed_trace(
    plan: Plan,
    step: int,
    measured: StepMeasurements,
    losses: Sequence[float],
    notes: Mapping[str, str],
) -> Trace:
    """Return the trace of one step, from the measured spans of each rank.

    Times count from the first start of any rank: ranks share one machine and one clock. A memory sample stands at its
    instruction's span, whichever step it was measured in; without spans there is none. Waits for Job.batch become
    `Trace.waits`.
    """
    zero = min((start for timed in measured.spans.values() for _, start, _ in timed), default=0.0)
    timeline: list[Span] = []
    waiting: list[Span] = []
    for rank, timed in sorted(measured.spans.items()):
        waited = [(mb, start - zero, end - zero) for mb, start, end in measured.waits.get(rank, ())]
        timeline += _without_waits(_rank_spans(plan, rank, sorted(timed), zero), waited)
        waiting += _waiting(plan, rank, waited)
    start = {(s.rank, s.instr): s.start for s in timeline}
    samples = tuple(
        MemSample(rank, p.instr, start[rank, p.instr], {MEASURED_BYTES: p.within})
        for rank, points in sorted(measured.memory.items())
        for p in points
        if (rank, p.instr) in start
    )
    return Trace(
        plan.key,
        "executed",
        tuple(timeline),
        samples,
        tuple(losses),
        step,
        dict(notes),
        tuple(waiting),
    )


def _rank_spans(plan: Plan, rank: int, found: Sequence[TimedSpan], zero: float) -> list[Span]:
    role = plan.role_of(rank)
    sizes = _Sizes(plan)
    ends: dict[str, list[float]] = {}
    spans = []
    for index, start, end in found:
        instr = role.program[index]
        ready = max((ends[s][n - 1] for s, n in instr.waits if n), default=0.0)
        done = ends.setdefault(instr.stream, [])
        # Communication may be posted before its predecessor on the stream has ended; it moves when that has.
        begin = max(start - zero, done[-1] if done else 0.0)
        done.append(end - zero)
        nbytes, flops = sizes(instr)
        spans.append(
            Span(rank, instr.stream, index, instr.name, begin, end - zero, ready, nbytes, flops)
        )
    return spans


def _waiting(plan: Plan, rank: int, waits: Sequence[Wait]) -> list[Span]:
    """Return a span for every wait for Job.batch, of the first instruction that loads its microbatch."""
    loading: dict[int, int] = {}
    for index, instr in enumerate(plan.role_of(rank).program):
        for part in instr.parts:
            if isinstance(part.op, Load):
                loading.setdefault(part.mb, index)
    return [
        Span(rank, BATCH, loading[mb], f"batch@{mb}", start, end, start)
        for mb, start, end in waits
        if mb in loading
    ]


def _without_waits(spans: list[Span], waits: Sequence[Wait]) -> list[Span]:
    """Start compute after its waits for Job.batch, since instructions usually load first."""
    adjusted = []
    for span in spans:
        inside = sum(
            max(0.0, min(end, span.end) - max(start, span.start)) for _, start, end in waits
        )
        adjusted.append(
            replace(span, start=span.start + inside) if inside and span.stream == COMPUTE else span
        )
    return adjusted


class _Sizes:
    """Count the bytes moved by a communication or inside of computation, and its FLOPs, once per step of a chunk."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._traffic = plan, PlanBytes(plan)
        self._steps: dict[Compute, tuple[int, int]] = {}

    def __call__(self, instr: Instr) -> tuple[int, int]:
        op = instr.parts[0].op
        if isinstance(op, COMM):
            return self._traffic.message_bytes(op, instr.parts[0]), 0
        steps = [self._step(p.op) for p in instr.parts if isinstance(p.op, Compute)]
        return sum([sent for sent, _ in steps]), sum([flops for _, flops in steps])

    def _step(self, op: Compute) -> tuple[int, int]:
        if op not in self._steps:
            sig = self._plan.chunk(op.variant).steps[op.step]
            sent = sum([bind(c.nbytes, self._plan.rows) for c in sig.collectives])
            self._steps[op] = sent, sig.cost.flops
        return self._steps[op]
