"""Compute figures of merit of a trace: each rank's compute, its idle time, and its waits for communication.

The definitions of `piper_ir.ground.intervals` are applied to spans, so that predicted and measured figures mean the
same. The simulator's communication starts when its last member is ready; a measured span starts when its own rank is,
and waits. Hence a transfer counts from the latest start among its members to its end on the rank itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from piper_ir.ground.intervals import Interval, idle
from piper_ir.ground.trace import BUSY_MACHINE, Span, Trace
from piper_ir.plan.plan import COMPUTE, Plan
from piper_report.facts.transfers import transfers


@dataclass(frozen=True, slots=True)
class RankIdle:
    """Hold the idle time of one rank, in seconds.

    Attributes:
        busy: the sum of its compute.
        global_bubble: the makespan of the step less `busy`.
        span_bubble: last end less first start less `busy` of its compute.
        exposed: how long its compute stream is idle while a transfer of it is under way; None without a plan, which
            says which spans belong together.
    """

    rank: int
    busy: float
    global_bubble: float
    span_bubble: float
    exposed: float | None


def makespan(trace: Trace) -> float:
    """Return the seconds from the first start to the last end of any rank."""
    return max((s.end for s in trace.spans), default=0.0) - min(
        (s.start for s in trace.spans), default=0.0
    )


def idle_ranks(trace: Trace, plan: Plan | None = None) -> list[RankIdle]:
    """Return the idle time of each rank of the trace, ascending by rank."""
    step = makespan(trace)
    working: dict[int, list[Span]] = {
        s.rank: [] for s in sorted(trace.spans, key=lambda s: (s.rank, s.start))
    }
    for s in sorted(trace.spans, key=lambda s: s.start):
        if s.stream == COMPUTE and s.end > s.start:
            working[s.rank].append(s)
    moving = _moving(plan, trace) if plan is not None else None
    idle_times = []
    for rank, spans in working.items():
        computing = [(s.start, s.end) for s in spans]
        seconds = idle(
            computing,
            None if moving is None else moving.get(rank, []),
            sum(s.end - s.start for s in spans),
        )
        idle_times.append(
            RankIdle(rank, seconds.busy, step - seconds.busy, seconds.span, seconds.exposed)
        )
    return idle_times


def _moving(plan: Plan, trace: Trace) -> dict[int, list[Interval]]:
    """Return by rank when data moves to or from it, counted as the docstring of the module says."""
    intervals_by_rank: dict[int, list[Interval]] = {}
    for group in transfers(plan, trace):
        begun = max(s.start for s in group)
        for s in group:
            if s.end > begun:
                intervals_by_rank.setdefault(s.rank, []).append((begun, s.end))
    return intervals_by_rank


def busy_note(measured: Trace | None) -> tuple[str, ...]:
    """Return a run's note about a machine on which its ranks did not have cores of their own."""
    note = measured.notes.get(BUSY_MACHINE) if measured is not None else None
    return (f"{BUSY_MACHINE}: {note}",) if note else ()
