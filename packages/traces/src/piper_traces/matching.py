"""Match the events of ranks to the instructions of a plan.

A trace of Piper's own run has a range by the name of each instruction (`piper run --profiler`), which is exact. Of
another system's trace the messages are known: the n-th message of a kind (its op, bytes and group's size) on a rank is
that of the plan as long as both go on alike, and the compute between two matched messages is that of the instructions
between them.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise

from piper_ir.ground.errors import FormatError
from piper_ir.ground.intervals import uncovered
from piper_ir.ground.trace import Span, Trace
from piper_ir.plan.phases import instr_label
from piper_ir.plan.plan import COMPUTE, Plan
from piper_ir.program.ops import COMM, message_op
from piper_simulator import Work
from piper_traces.breakdown import window
from piper_traces.events import DeviceEvent, RankEvents

SAME_SIZE = 0.01
"""The largest relative difference between a planned message size and a traced one: other systems pad tensors."""


@dataclass(frozen=True)
class Matched:
    """Hold when the instructions of a plan ran, by the ranges of a trace.

    Attributes:
        trace: the spans, in seconds from the first.
        step_s: seconds per step by the marks of the profiler.
        missing: names of instructions without a range, each once.
        unplanned: names of ranges of a microbatch that no instruction has, each once.
    """

    trace: Trace
    step_s: float
    missing: tuple[str, ...]
    unplanned: tuple[str, ...] = ()


_OF_MICROBATCH = re.compile(r"[^@]+@\d+([#+].*)?")
"""The names of instructions that have a microbatch, such as layer2.I@6+6 (`piper_ir.plan.plan.Instr.name`)."""


def match_ranges(plan: Plan, ranks: Sequence[RankEvents], step: int | None = None) -> Matched:
    """Return when the instructions of a plan ran, from the ranges that have their names, of one step.

    On a device an instruction lasts from the first to the last event that was launched in its range, and for as long as
    the range on a CPU. `step` is as for `piper_traces.breakdown`; without one, the last marked step counts.

    Raises FormatError for a trace of a rank that is not in the plan, and for one without any of its ranges.
    """
    spans: list[tuple[int, int, float, float]] = []
    missing: dict[str, None] = {}
    unplanned: dict[str, None] = {}
    step_s, number = 0.0, 0
    for events in ranks:
        _check_rank(plan, events)
        marked = events.steps[-1] if events.steps and step is None else None
        (start, end), _ = window(events, step if marked is None else marked[0])
        if marked is not None:
            number, start, end = marked
        step_s = max(step_s, end - start)
        program = plan.role_of(events.rank).program
        waiting: dict[str, deque[int]] = defaultdict(deque)
        for index, instr in enumerate(program):
            waiting[instr.name].append(index)
        launched = _launched(events)
        found = 0
        for r in events.ranges:
            if not start <= r.start < end:
                continue
            if named := waiting.get(r.name):
                found += 1
                spans.append((events.rank, named.popleft(), *_lasted(launched, r.start, r.end)))
            elif _OF_MICROBATCH.fullmatch(r.name):
                unplanned[r.name] = None
        if not found:
            raise FormatError(
                f"{events.path}: no range has the name of an instruction of the plan, as in "
                f"{program[0].name!r}; `piper run FILE.py --profiler` writes such traces, of the job and strategy that ran"
            )
        missing |= {name: None for name, left in waiting.items() if left}
    zero = min((s[2] for s in spans), default=0.0)
    trace = _executed(plan, spans, zero, number)
    return Matched(trace, step_s, tuple(missing), tuple(unplanned))


def _check_rank(plan: Plan, events: RankEvents) -> None:
    if not 0 <= events.rank < plan.mesh.world:
        said = "does not say its rank" if events.rank < 0 else f"is of rank {events.rank}"
        raise FormatError(
            f"{events.path}: the trace {said}; the plan has ranks 0 to {plan.mesh.world - 1}. A name such as "
            f"rank3_trace.json says it"
        )


def _launched(events: RankEvents) -> list[tuple[float, float, float]]:
    """Return (launch, start, end) of events on a device, by launch."""
    return sorted((e.launched, e.start, e.end) for e in events.events if e.launched is not None)


def _lasted(
    launched: Sequence[tuple[float, float, float]], start: float, end: float
) -> tuple[float, float]:
    """Return when the work of a range on the host ran: on the device, if it launched any."""
    first = bisect_left(launched, (start,))
    inside = launched[first : bisect_left(launched, (end,))]
    if not inside:
        return start, end
    return min(s for _, s, _ in inside), max(e for _, _, e in inside)


def _executed(
    plan: Plan, spans: Sequence[tuple[int, int, float, float]], zero: float, step: int
) -> Trace:
    made = []
    for rank, index, start, end in sorted(spans):
        instr = plan.role_of(rank).program[index]
        made.append(Span(rank, instr.stream, index, instr.name, start - zero, end - zero))
    return Trace(plan.key, "executed", tuple(made), step=step)


@dataclass(frozen=True, slots=True)
class PlannedMessage:
    """Describe a message of a plan on one rank.

    Attributes:
        instr: the index of its instruction; of a message inside of a step, of that step's.
        axes: the mesh axes of its group, joined by "+"; the purpose of a transfer.
        size: the number of ranks in its group.
    """

    instr: int
    axes: str
    op: str
    nbytes: int
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MessageRow:
    """Hold the messages of one kind in plan and trace, of all given ranks, for one step."""

    axes: str
    op: str
    nbytes: int
    planned: int
    traced: int
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class WindowRow:
    """Hold the compute between matched messages, by the kinds of instructions that the plan has there."""

    kinds: str
    count: int
    predicted_s: float
    measured_s: float


@dataclass(frozen=True)
class MatchedMessages:
    """Hold the messages that plan and trace have in common, and the messages of only one of them.

    Attributes:
        rows: messages of the plan by kind, with their counterparts in the trace.
        windows: compute between matched messages.
        unplanned: messages of the trace that are not in the plan: (op, bytes, group's size) -> how many in all.
        matched: the share of the plan's messages that are in the trace.
    """

    rows: tuple[MessageRow, ...]
    windows: tuple[WindowRow, ...]
    unplanned: Mapping[tuple[str, int, int], int]
    matched: float


def match_messages(
    plan: Plan,
    work: Mapping[int, Sequence[Work]],
    ranks: Sequence[RankEvents],
    step: int | None = None,
) -> MatchedMessages:
    """Return which messages of a plan are in a trace.

    `work` has, by rank, the work of each of its instructions. Sizes count as equal within about 1 %. Raises FormatError
    for a trace of a rank that is not in the plan, and for messages without sizes, as older versions of torch record.
    """
    rows: dict[tuple[str, str, int], list[float]] = {}
    windows: dict[str, list[float]] = {}
    unplanned: Counter[tuple[str, int, int]] = Counter()
    planned_count = matched_count = 0
    for events in ranks:
        _check_rank(plan, events)
        (start, end), steps = window(events, step)
        sent = [e for e in events.events if e.kind == "message" and start <= e.start < end]
        if any(e.message is None for e in sent) or (
            sent and not any(e.message.nbytes for e in sent if e.message)
        ):
            raise FormatError(
                f"{events.path}: its messages have no sizes (Collective name, In msg nelems), by which they are found in "
                f"the plan; profile a run over NCCL (traces of gloo have none) with torch from 2.4 on"
            )
        planned = list(planned_messages(plan, events.rank, work[events.rank]))
        pairs = _pairs(planned * steps, sent)
        for p in planned:
            row = rows.setdefault((p.axes, p.op, p.nbytes), [0, 0, 0.0, 0.0])
            row[0] += 1
            row[2] += p.seconds
        for i, k in pairs:
            p = planned[i % len(planned)]
            row = rows[p.axes, p.op, p.nbytes]
            row[1] += 1 / steps
            row[3] += (sent[k].end - sent[k].start) / steps
        taken = {k for _, k in pairs}
        unplanned.update(
            (e.message.op, e.message.nbytes, e.message.size)
            for k, e in enumerate(sent)
            if k not in taken and e.message is not None
        )
        planned_count += len(planned) * steps
        matched_count += len(pairs)
        for kinds, predicted, measured in _windows(
            plan, events, work[events.rank], planned, pairs, sent
        ):
            window_row = windows.setdefault(kinds, [0, 0.0, 0.0])
            window_row[0] += 1
            window_row[1] += predicted
            window_row[2] += measured
    return MatchedMessages(
        tuple(
            MessageRow(*key, int(n), round(m), planned_s, measured_s)
            for key, (n, m, planned_s, measured_s) in rows.items()
        ),
        tuple(
            WindowRow(kinds, int(n), predicted, measured)
            for kinds, (n, predicted, measured) in sorted(windows.items())
        ),
        unplanned,
        matched_count / planned_count if planned_count else 0.0,
    )


def planned_messages(plan: Plan, rank: int, work: Sequence[Work]) -> Iterator[PlannedMessage]:
    """Yield the messages of a rank in program order; of those inside of a step, each kind in turn."""
    degree = dict(plan.mesh.sizes)
    for index, (instr, done) in enumerate(zip(plan.role_of(rank).program, work, strict=True)):
        op = instr.parts[0].op
        if isinstance(op, COMM):
            channel = plan.channel(op.channel)
            axes = channel.purpose if channel.kind == "p2p" else "+".join(channel.over)
            size = len(plan.peers(channel, rank))
            yield PlannedMessage(index, axes, message_op(op), done.bytes, size, done.seconds)
            continue
        inside = [
            PlannedMessage(
                index,
                m.axis,
                m.op,
                m.bytes // m.count,
                math.prod(degree.get(a, 1) for a in m.axis.split("+")),
                m.seconds / m.count,
            )
            for m in done.inside
            for _ in range(m.count)
        ]
        yield from inside


def _pairs(planned: Sequence[PlannedMessage], sent: Sequence[DeviceEvent]) -> list[tuple[int, int]]:
    """Return the pairs of indices of messages that stand for each other, in order."""
    here = [(p.op, p.size, p.nbytes) for p in planned]
    known = {p.nbytes for p in planned}
    messages = [e.message for e in sent if e.message]
    there = [(m.op, m.size, _nearest(known, m.nbytes)) for m in messages]
    blocks = SequenceMatcher(None, here, there, autojunk=False).get_matching_blocks()
    return [(i + k, j + k) for i, j, n in blocks for k in range(n)]


def _nearest(known: Collection[int], nbytes: int) -> int:
    """Return the known size that is nearest to a number of bytes, or this number if none is within 1 %."""
    nearest = min(known, key=lambda size: abs(size - nbytes), default=nbytes)
    return nearest if abs(nearest - nbytes) <= SAME_SIZE * nbytes else nbytes


def _windows(
    plan: Plan,
    events: RankEvents,
    work: Sequence[Work],
    planned: Sequence[PlannedMessage],
    pairs: Sequence[tuple[int, int]],
    sent: Sequence[DeviceEvent],
) -> Iterator[tuple[str, float, float]]:
    """Yield (kinds, predicted seconds, measured seconds) of the compute between neighbours of matched messages.

    Between means launched between them, since hosts launch in program order, whenever that then runs.
    """
    program = plan.role_of(events.rank).program
    computing = sorted((e for e in events.events if e.kind not in ("message", "copy")), key=_issued)
    issued = [_issued(e) for e in computing]
    for (i, k), (j, m) in pairwise(pairs):
        if j != i + 1 or m != k + 1 or i % len(planned) > j % len(planned):
            continue
        first, last = planned[i % len(planned)].instr, planned[j % len(planned)].instr
        between = [
            n for n in range(first + 1, last) if program[n].stream == COMPUTE and work[n].seconds
        ]
        inside = computing[
            bisect_left(issued, _issued(sent[k])) : bisect_left(issued, _issued(sent[m]))
        ]
        if between and inside:
            kinds = Counter(phase for n in between for phase, _ in instr_label(program[n]).halves)
            name = " ".join(f"{n} {phase}" for phase, n in sorted(kinds.items()))
            predicted = sum(work[n].seconds - work[n].inside_s for n in between)
            yield name, predicted, uncovered([(e.start, e.end) for e in inside], ())


def _issued(event: DeviceEvent) -> float:
    """Return when an event was launched; when it began, if the trace does not say that."""
    return event.start if event.launched is None else event.launched
