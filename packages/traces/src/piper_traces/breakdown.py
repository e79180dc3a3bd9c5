"""Count where the time of a rank's step went: compute, exposed communication, copies, gaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from piper_ir.ground.errors import FormatError
from piper_ir.ground.intervals import Interval, uncovered, united
from piper_traces.events import DeviceEvent, RankEvents

LAUNCH_S = 10e-6
"""A kernel that begins within this time of its launch was waited for by an idle device: it had nothing queued.

A launch takes 3 to 10 microseconds to reach an idle device, and a queued kernel begins when its predecessors end.
"""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Hold the messages of one group and op.

    Attributes:
        group: the name of the process group, or its size.
        seconds: when at least one of them was under way.
        exposed_s: the part of `seconds` in which the device did not compute.
        nbytes: bytes of all of them; 0 if the trace has none.
    """

    group: str
    op: str
    count: int
    nbytes: int
    seconds: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class LaunchGaps:
    """Hold the time in which a device had nothing to do because nothing had been launched.

    Attributes:
        known: whether the trace says when kernels were launched.
    """

    count: int
    seconds: float
    known: bool


@dataclass(frozen=True)
class Breakdown:
    """Hold the seconds of a rank's steps, per step.

    Attributes:
        steps: how many steps were counted.
        step_s: seconds per step.
        compute_s: when kernels that are neither messages nor copies ran.
        copy_s: when copies ran, and nothing computed.
        message_s: when messages were under way.
        exposed_s: when messages were under way and nothing computed.
        idle_s: when nothing ran on the device.
        by_kind: kind of work -> seconds of its kernels, one after the other.
        traffic: messages by group and op, the longest exposed first.
        gaps: idle time that the host caused.
    """

    rank: int
    steps: int
    step_s: float
    compute_s: float
    copy_s: float
    message_s: float
    exposed_s: float
    idle_s: float
    by_kind: dict[str, float]
    traffic: tuple[Traffic, ...]
    gaps: LaunchGaps


def breakdown(rank: RankEvents, step: int | None = None) -> Breakdown:
    """Return where the time of a rank's steps went.

    Args:
        rank: the events; on a CPU, operators count as compute.
        step: the number of a step that the profiler has marked; None: all of the marked steps but the first, which
            begins with an idle device, or all of the trace without marks.

    Raises FormatError for a trace without events, and for a step that is not in it.
    """
    (start, end), steps = window(rank, step)
    events = [e for e in rank.events if e.end > start and e.start < end]
    if not events:
        raise FormatError(
            f"{rank.path}: no kernel, no operator and no message in the step; profile with activities=[CPU, CUDA]"
        )
    compute = united(_cut(start, end, [e for e in events if e.kind not in ("message", "copy")]))
    messages = united(_cut(start, end, [e for e in events if e.kind == "message"]))
    copies = united(_cut(start, end, [e for e in events if e.kind == "copy"]))
    busy = united([*compute, *messages, *copies])
    by_kind: dict[str, float] = defaultdict(float)
    for e in events:
        by_kind[e.kind] += min(end, e.end) - max(start, e.start)
    return Breakdown(
        rank.rank,
        steps,
        (end - start) / steps,
        uncovered(compute, ()) / steps,
        uncovered(copies, compute) / steps,
        uncovered(messages, ()) / steps,
        uncovered(messages, compute) / steps,
        (end - start - uncovered(busy, ())) / steps,
        {kind: seconds / steps for kind, seconds in sorted(by_kind.items())},
        _traffic(events, compute, (start, end), steps),
        _launch_gaps(events, steps),
    )


def window(rank: RankEvents, step: int | None) -> tuple[Interval, int]:
    """Return the interval of the steps that count, and their number; see `breakdown`."""
    marked = rank.steps
    if step is not None:
        for number, start, end in marked:
            if number == step:
                return _on_device(rank, (start, end)), 1
        there = ", ".join(str(n) for n, _, _ in marked) or "none (no ProfilerStep in it)"
        raise FormatError(f"{rank.path}: no step {step}; its steps are {there}")
    if marked:
        counted = marked[1:] if len(marked) > 1 else marked
        return _on_device(rank, (counted[0][1], counted[-1][2])), len(counted)
    moments = [(e.start, e.end) for e in rank.events] + [(r.start, r.end) for r in rank.ranges]
    if not moments:
        raise FormatError(f"{rank.path}: no kernel, no operator and no range in it")
    return (min(a for a, _ in moments), max(b for _, b in moments)), 1


def _on_device(rank: RankEvents, host: Interval) -> Interval:
    """Return when a device did the work that was launched in an interval: it begins later than its launch.

    It ends when that of the next step begins. Behind the last one that would be as long after the host as here.
    """
    launched = [e for e in rank.events if e.launched is not None and e.launched >= host[0]]
    inside = [e for e in launched if e.launched is not None and e.launched < host[1]]
    if not inside:
        return host
    begin = min(e.start for e in inside)
    later = [e.start for e in launched if e.launched is not None and e.launched >= host[1]]
    following = min(later, default=host[1] + begin - host[0])
    return begin, max(following, max(e.end for e in inside))


def _cut(start: float, end: float, events: Sequence[DeviceEvent]) -> list[Interval]:
    return [(max(start, e.start), min(end, e.end)) for e in events]


def _traffic(
    events: Sequence[DeviceEvent], compute: Sequence[Interval], step: Interval, steps: int
) -> tuple[Traffic, ...]:
    by_use: dict[tuple[str, str], list[DeviceEvent]] = defaultdict(list)
    for e in events:
        if e.kind == "message":
            label, op = (e.message.label, e.message.op) if e.message else ("unknown", e.name[:40])
            by_use[label, op].append(e)
    rows = []
    for (group, op), used in by_use.items():
        running = united(_cut(*step, used))
        rows.append(
            Traffic(
                group,
                op,
                round(len(used) / steps),
                sum([e.message.nbytes for e in used if e.message]) // steps,
                uncovered(running, ()) / steps,
                uncovered(running, compute) / steps,
            )
        )
    return tuple(sorted(rows, key=lambda t: (-t.exposed_s, t.group, t.op)))


def _launch_gaps(events: Sequence[DeviceEvent], steps: int) -> LaunchGaps:
    """Return the idle time before kernels that began as soon as they were launched."""
    busy_to, count, seconds = None, 0, 0.0
    for e in events:
        if (
            busy_to is not None
            and e.launched is not None
            and e.start > busy_to
            and e.start - e.launched < LAUNCH_S
        ):
            count += 1
            seconds += e.start - busy_to
        busy_to = e.end if busy_to is None else max(busy_to, e.end)
    known = any(e.launched is not None for e in events)
    return LaunchGaps(count // steps, seconds / steps, known)
