"""Run plans by events: each stream of each role goes on by itself, from one event of a `EventClock` to the next.

The rules come from `piper_ir.fold.timing`, which sweeps the same plan in a fixed order instead; a property test holds
the two against each other. With `flows`, activities at the same time slow each other down: an instruction then takes
its duration only if nothing else runs beside it (`piper_simulator.contention.rates`). The sweep has no contention.

The engine is deterministic: streams start in plan order, and events of one moment are handled in the order in which
they were made. The tests have an engine of SimPy's events, which gives the same times to the bit.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, repeat

from piper_ir.fold.issue import Issue
from piper_ir.fold.steady_state import host_seconds, later_half
from piper_ir.fold.timing import Prepared, Times
from piper_simulator.contention.loads import TimedPiece
from piper_simulator.contention.rates import Flow
from piper_simulator.times.clock import EventClock
from piper_simulator.times.repetition import EngineState, StepEnds
from piper_simulator.times.shared_activities import SharedActivities
from piper_simulator.times.step_work import StepWork


def run_engine(
    prepared: Prepared,
    durations: Sequence[float],
    *,
    latency: float = 0.0,
    issue: Issue | None = None,
    steps: int = 1,
    flows: Sequence[Flow] | None = None,
    inside: Mapping[int, Sequence[TimedPiece]] | None = None,
) -> list[Times]:
    """Return the times of each of `steps` steps that follow each other without a barrier.

    They are seconds since the start of the first step. `durations` are per node, a group taking that of its first
    member; `latency` is that of a point-to-point transfer, `issue` says when hosts issue. `flows` give for each group
    its load on links and devices, and its duration (0 for that in `durations`); None: nothing is shared. `inside` has
    the pieces of the nodes with messages inside of their steps, which share links like others.
    """
    return run_steps(StepWork(prepared, durations, latency, issue, flows, inside), steps)


def run_steps(work: StepWork, steps: int = 1) -> list[Times]:
    """Return the times of `run_engine`."""
    return _run(_Engine(work, steps, _no_times(work.prepared, steps)))


PERIOD_STEPS = 6, 16
"""The numbers of steps that are run to see them repeat, first the one, then the other."""


def step_and_period(work: StepWork) -> tuple[Times, float]:
    """Return the times of one step alone, and the period as `piper_ir.fold.steady_state.period`, but under contention.

    Steps run until they repeat, to 1e-9: until the longest stream, at one of its `MARKS`, finds all others and all that
    is under way as a step ago, or else until every stream advances alike. They count as long as every stream has more
    to come, since afterwards there is less to share with. If a stream runs so far ahead that hardly any step is left,
    all count.

    Steps that follow each other do the same as one alone until a stream has ended its part of it. So they go on from a
    copy of the engine at that moment.
    """
    prepared = work.prepared
    engine = _Engine(work, 1, _no_times(prepared, 1), branches=True)
    (alone,) = _run(engine)
    host = host_seconds(work.issue)
    if not prepared.streams:
        return alone, 0.0
    branch = engine.branch
    assert branch is not None, "some stream has ended"
    for steps in PERIOD_STEPS:
        ends = StepEnds(len(prepared.streams), steps, host)
        branch.copied().follow(steps, ends)
        if ends.period_s is not None:
            break
    branch.drop()
    if ends.period_s is not None:
        return alone, ends.period_s
    enough = len(ends.counted) > steps // 2
    return alone, later_half(ends.counted if enough else ends.rows, host)


MARKS = 16
"""The places in a step, equally many instructions apart, at which it is compared with the step before."""


def _no_times(prepared: Prepared, steps: int) -> list[Times]:
    n, roles = len(prepared), len(prepared.roles)
    return [Times([0.0] * n, [0.0] * n, [0.0] * n, [0.0] * n, [0.0] * roles) for _ in range(steps)]


def _run(engine: _Engine) -> list[Times]:
    engine.start()
    engine.clock.run()
    engine.finish()
    engine.drop()
    return list(engine.times)


@dataclass(slots=True, eq=False)
class _Counter:
    """Count the finished instructions of a stream, remember the times, and wake the waiters for a number.

    `pending` has the ones that have ended and are not done, oldest first, each with whether it is itself under way.
    """

    clock: EventClock
    at: array[float] = field(default_factory=lambda: array("d"))
    waiting: dict[int, list[Callable[[], None]]] = field(default_factory=dict)
    pending: deque[bool] = field(default_factory=deque)

    def count(self) -> None:
        self.at.append(self.clock.now)
        if self.waiting:
            for go in self.waiting.pop(len(self.at), ()):
                self.clock.after(0.0, go)

    def wake(self, number: int, go: Callable[[], None]) -> None:
        """Call `go` when the count reaches a number."""
        self.waiting.setdefault(number, []).append(go)

    def depart(self, latency: float) -> None:
        """Let a transfer leave the stream free for the next, and reach its waiters later."""
        self.pending.append(True)
        self.clock.after(latency, self._arrive)

    def _arrive(self) -> None:
        """Count the oldest transfer under way as arrived, with everything behind it that only had to keep the order."""
        self.pending.popleft()
        self.count()
        while self.pending and not self.pending[0]:
            self.pending.popleft()
            self.count()


@dataclass(slots=True, eq=False)
class _Meeting:
    """Hold the members of a group that have come, each with a function for its end; the last to come runs it."""

    came: int = 0
    gate: list[Callable[[float], None]] = field(default_factory=list)


class _Stream:
    """Run the instructions of one stream of a role, one after the other.

    Attributes:
        done: counts the instructions that waiters have seen done.
        at: the index of the instruction that is next or runs, in step `step`.
        began: when it began.
        marks: the places at which the engine looks at it.
    """

    __slots__ = (
        "at",
        "began",
        "clock",
        "done",
        "engine",
        "index",
        "marks",
        "part",
        "step",
        "times",
    )

    def __init__(self, engine: _Engine, index: int) -> None:
        self.engine, self.index, self.clock = engine, index, engine.clock
        self.part = engine.work.parts[index]
        self.done = engine.counters[index]
        self.at = self.step = 0
        self.began = 0.0
        self.marks: frozenset[int] = frozenset()
        self.times = engine.times[0] if engine.times else None

    def take(self, other: _Stream, engine: _Engine) -> None:
        """Be at the place of another stream, in an engine that has its counters."""
        self.engine, self.index, self.clock = engine, other.index, engine.clock
        self.part, self.done = other.part, engine.counters[other.index]
        self.at, self.step, self.began, self.marks = other.at, other.step, other.began, other.marks
        self.times = None

    def go(self) -> None:
        """Go on until something must be waited for, which then calls this again."""
        engine, part, clock = self.engine, self.part, self.clock
        counters, shared, size = engine.counters, engine.shared, len(part.work)
        issued = None if engine.work.issue is None else engine.work.issue.at
        while self.at < size or self._next_step():
            step, times, ready = self.step, self.times, 0.0
            node, needs, group, duration, flow = part.work[self.at]
            if issued is not None:
                ready = engine.begun[part.role][step] + issued[node]
                if ready > clock.now:
                    self._wait_until(ready)
                    return
            for stream, k, per_step in needs:
                target = k + step * per_step
                counter = counters[stream]
                if len(counter.at) < target:
                    counter.wake(target, self.go)
                    return
                if times is not None and target and (done := counter.at[target - 1]) > ready:
                    ready = done
            if times is not None:
                times.ready[node] = ready
            if group >= 0 and not engine.come(group, self._met):
                return
            self.began = clock.now
            if not duration:
                self._end(node, group)
                continue
            if shared is None:
                clock.after(duration, self._ended)
            elif flow is None:
                shared.compute(part.role, node, duration, self._ended)
            else:
                shared.message(flow, self._ended)
            return

    def _next_step(self) -> bool:
        """Begin the next step, if there is one."""
        engine = self.engine
        if self.step + 1 == engine.steps:
            engine.branch_off(self)
        self.at, self.step = 0, self.step + 1
        if self.times is not None and self.step < engine.steps:
            self.times = engine.times[self.step]
        return self.step < engine.steps

    def _wait_until(self, moment: float) -> None:
        """Go on at a moment, to the bit: a sum of floats is exact if neither is more than the other, or is 0."""
        now = self.clock.now
        wait = moment - now
        self.clock.after(wait if wait <= now or not now else 0.75 * wait, self._waited)

    def _waited(self) -> None:
        self.engine.waited[self.part.role] = self.clock.now
        self.go()

    def _ended(self) -> None:
        node, _, group, _, _ = self.part.work[self.at]
        self._end(node, group)
        self.go()

    def _end(self, node: int, group: int) -> None:
        """End an instruction that this stream has run."""
        if group >= 0:
            self.engine.ended(group, self.began)
        self._leave(node, group)

    def _met(self, start: float) -> None:
        """End an instruction that another member of its group has run."""
        self.began = start
        node, _, group, _, _ = self.part.work[self.at]
        self._leave(node, group)
        self.go()

    def _leave(self, node: int, group: int) -> None:
        """Leave the stream to the next instruction; a transfer arrives later."""
        engine, done, times = self.engine, self.done, self.times
        if times is not None:
            times.start[node], times.end[node] = self.began, self.clock.now
        if group >= 0 and engine.work.latency and engine.work.prepared.p2p[group]:
            done.depart(engine.work.latency)
        elif done.pending:
            done.pending.append(False)
        else:
            done.count()
        self.at = at = self.at + 1
        if at in self.marks:
            engine.marked(self)


class _Engine:
    """Hold the streams of a plan and their shared state; `times` has an entry per step, or none.

    Attributes:
        rest: functions that are still to be called at this moment, before the next event.
        meetings: by group, the members that have come to it.
        begun: by role, when its host begins with each step.
        waited: by role, when it has last waited for its host.
        states: by place of the longest stream, the state when it was there last.
        branch: with `branches`, a copy of the engine when its first stream has ended all steps.
    """

    def __init__(
        self, work: StepWork, steps: int, times: Sequence[Times], branches: bool = False
    ) -> None:
        self.work, self.steps, self.times = work, steps, times
        self.clock = EventClock()
        self.shared = (
            SharedActivities(self.clock, len(work.prepared.roles), work.profiles)
            if work.shares
            else None
        )
        self.ends: StepEnds | None = None
        self.rest: deque[Callable[[], None]] = deque()
        self.counters = [_Counter(self.clock) for _ in work.parts]
        self.meetings: dict[int, _Meeting] = {}
        self.begun = self._begun()
        self.waited: dict[int, float] = {}
        self.states: dict[int, EngineState] = {}
        self.branch: _Engine | None = None
        self._branches, self._first, self._longest = branches, -1, -1
        self.streams = [_Stream(self, s) for s in range(len(work.parts))]
        if branches and self.streams:
            for stream in self.streams:
                stream.marks = frozenset((len(stream.part.work),))
            longest = max(self.streams, key=lambda s: len(s.part.work))
            self._longest = longest.index
            size = len(longest.part.work)
            longest.marks = frozenset([size * k // MARKS for k in range(1, MARKS + 1)])

    def start(self) -> None:
        """Let all streams go, in plan order."""
        self.rest.extend([stream.go for stream in self.streams])
        self._call_rest()

    def _call_rest(self) -> None:
        while self.rest:
            self.rest.popleft()()

    def branch_off(self, stream: _Stream) -> None:
        """Keep a copy of the engine, in which this stream has ended its steps."""
        if self._branches:
            self._branches, self._first = False, stream.index
            self.branch = self.copied()

    def copied(self) -> _Engine:
        """Return a copy that keeps no times."""
        memo: dict[int, object] = {id(times): None for times in self.times}
        memo[id(self.times)] = ()
        memo |= {id(state): state for state in self.states.values()}
        others = [_Stream.__new__(_Stream) for _ in self.streams]
        memo |= {id(stream): other for stream, other in zip(self.streams, others)}
        engine = deepcopy(self, memo)
        for stream, other in zip(self.streams, others):  # one by one: they wait for each other
            other.take(stream, engine)
        return engine

    def follow(self, steps: int, ends: StepEnds) -> None:
        """Go on from a branch until it is known how long steps take that follow the first."""
        self.steps, self.ends = steps, ends
        self.begun = self._begun()
        stream = self.streams[self._first]
        ends.ended(stream.index, stream.step, self.clock.now)
        stream.go()
        self._call_rest()
        self.clock.run()
        self.drop()

    def drop(self) -> None:
        """Drop the objects that refer to each other, so that they are gone without the garbage collector."""
        for stream in self.streams:  # which wait for each other
            del stream.part, stream.times
        del self.work
        self.streams, self.counters, self.shared = [], [], None
        self.clock.drop()

    def marked(self, stream: _Stream) -> None:
        """Compare the engine with a step ago if the longest stream is at a mark, and record the end of a step."""
        ends, at = self.ends, stream.at
        if stream.index == self._longest and (state := self._state(stream.step)):
            before, self.states[at] = self.states.get(at), state
            if ends is not None and before is not None:
                ends.seen(state, before)
        if ends is not None:
            if at == len(stream.part.work):
                ends.ended(stream.index, stream.step, self.clock.now)
            self.clock.stopped = ends.known

    def _state(self, step: int) -> EngineState | None:
        """Return the state at a mark of a step; None with latencies, on which it depends, too."""
        if self.shared is None or self.work.latency:
            return None
        now = self.clock.now
        places, seconds = self.shared.under_way_at(now)
        for stream, counter in zip(self.streams, self.counters, strict=True):
            done = len(counter.at) - step * len(stream.part.work)
            places.append((stream.at, stream.step - step, done))
        met = [(group, meeting.came) for group, meeting in sorted(self.meetings.items())]
        hosts = [begun[step] - now for begun in self.begun]
        return EngineState(now, (*places, *met), seconds, hosts, dict(self.waited))

    def come(self, group: int, met: Callable[[float], None]) -> bool:
        """Return whether all of a group have come, so that it runs now; else `met` is called with its start."""
        size = len(self.work.prepared.groups[group])
        meeting = self.meetings.get(group)
        if meeting is None:
            meeting = self.meetings[group] = _Meeting()
        meeting.came += 1
        if meeting.came == size:
            return True
        meeting.gate.append(met)
        return False

    def ended(self, group: int, start: float) -> None:
        """End a group, which ran from `start` to now."""
        gate = self.meetings.pop(group).gate
        self.clock.after(0.0, partial(self._open, gate, start))

    def _open(self, gate: Sequence[Callable[[float], None]], start: float) -> None:
        self.rest.extend([partial(met, start) for met in gate])
        self._call_rest()

    def _begun(self) -> list[list[float]]:
        """Return by role when its host begins with each step, and when it is through."""
        issue = self.work.issue
        return [
            list(accumulate(repeat(step_s, self.steps), initial=0.0))
            for step_s in (issue.step_s if issue is not None else ())
        ]

    def finish(self) -> None:
        """Enter into the times when nodes were done, and when hosts had issued everything."""
        for step, times in enumerate(self.times):
            for counter, nodes in zip(self.counters, self.work.prepared.streams):
                done = counter.at[step * len(nodes) : (step + 1) * len(nodes)]
                for node, at in zip(nodes, done, strict=True):
                    times.done[node] = at
            for r, begun in enumerate(self.begun):
                times.host[r] = begun[step + 1]
