"""Measured spans as the trace that every executor writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from piper_ir.ops import COMM, Compute
from piper_ir.plan import Instr, Plan
from piper_ir.trace import MemSample, Span, Trace
from piper_ir.traffic import Traffic
from piper_runtime.memory import MemoryPoint

TimedSpan = tuple[int, float, float]
"""Index of the instruction, start and end in seconds on the machine-wide clock of time.perf_counter."""
MEASURED_BYTES = "measured"
"""The category of measured memory: a counter of storages cannot tell a parameter from an activation."""


def executed_trace(
    plan: Plan,
    step: int,
    spans: Mapping[int, Sequence[TimedSpan]],
    memory: Mapping[int, Sequence[MemoryPoint]],
    losses: Sequence[float],
    notes: Mapping[str, str],
) -> Trace:
    """The trace of one step. Times count from the first start of any rank: ranks share one machine and one clock. A point of
    memory stands where its instruction has its span, whichever step it was measured in; without spans there is none."""
    zero = min((start for found in spans.values() for _, start, _ in found), default=0.0)
    out: list[Span] = []
    for rank, found in sorted(spans.items()):
        out += _rank_spans(plan, rank, sorted(found), zero)
    start = {(s.rank, s.instr): s.start for s in out}
    samples = tuple(
        MemSample(rank, p.instr, start[rank, p.instr], {MEASURED_BYTES: p.within})
        for rank, points in sorted(memory.items())
        for p in points
        if (rank, p.instr) in start
    )
    return Trace(plan.key, "executed", tuple(out), samples, tuple(losses), step, dict(notes))


def _rank_spans(plan: Plan, rank: int, found: Sequence[TimedSpan], zero: float) -> list[Span]:
    role = plan.role_of(rank)
    sizes = _Sizes(plan)
    ends: dict[str, list[float]] = {}
    out = []
    for index, start, end in found:
        instr = role.program[index]
        ready = max((ends[s][n - 1] for s, n in instr.waits if n), default=0.0)
        done = ends.setdefault(instr.stream, [])
        # Communication may be posted before what is in front of it on its stream has ended; it moves when that has.
        begin = max(start - zero, done[-1] if done else 0.0)
        done.append(end - zero)
        nbytes, flops = sizes(instr)
        out.append(Span(rank, instr.stream, index, instr.name, begin, end - zero, ready, nbytes, flops))
    return out


class _Sizes:
    """Bytes moved by a communication and FLOPs done by computation; FLOPs of a chunk's step are summed once."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._traffic = plan, Traffic(plan)
        self._flops: dict[Compute, int] = {}

    def __call__(self, instr: Instr) -> tuple[int, int]:
        op = instr.parts[0].op
        if isinstance(op, COMM):
            return self._traffic.message(op, instr.parts[0]), 0
        return 0, sum(self._step_flops(p.op) for p in instr.parts if isinstance(p.op, Compute))

    def _step_flops(self, op: Compute) -> int:
        if op not in self._flops:
            assert op.step != "B"
            self._flops[op] = self._plan.chunk(op.chunk).steps[op.step].cost.flops
        return self._flops[op]
