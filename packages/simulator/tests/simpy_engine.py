"""The event engine as it was on SimPy's events, with an event for each piece of an instruction.

The engine of Piper has a clock of its own and advances pieces by arithmetic. It must give the same times to the bit.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from simpy import Environment, Event
from simpy.events import Timeout

from piper_ir.fold.steady_state import later_half, steady
from piper_ir.fold.timing import Prepared, Times, after_updates
from piper_simulator.contention.loads import TimedPiece
from piper_simulator.contention.rates import Activity, Flow, RunningMessage, SharedPool
from piper_simulator.times.engine import PERIOD_STEPS


class EventPool(SharedPool):
    """A pool to whose compute the one who runs it adds an event."""

    def compute(self, role: int, seconds: float, now: float) -> Activity:
        """Begin compute of `seconds` on a role that is not computing."""
        activity = Activity(seconds, now, now)
        activity.rate = self.enter(role, activity)
        activity.end = now + seconds / activity.rate
        return activity

    def computed(self, role: int) -> None:
        """End the compute of a role."""
        self._computing[role] = None


class SharedActivities:
    """Run activities at the rates of a pool.

    A timer whose activity became slower looks again at its new end; a timer after which a nearer one was set does
    nothing.
    """

    def __init__(self, env: Environment, roles: int) -> None:
        self.env = env
        self.pool = EventPool(roles, self._sooner)
        self.ends: dict[Activity, tuple[Callable[[Event], None], int]] = {}

    def run(self, role: int, pieces: Sequence[TimedPiece], ended: Callable[[Event], None]) -> None:
        """Run pieces of compute and messages of a role, one after the other; `ended` is called at the end."""
        (seconds, flow), *others = pieces
        self.begin(
            role, seconds, flow, (lambda _: self.run(role, others, ended)) if others else ended
        )

    def begin(
        self, role: int, seconds: float, flow: Flow | None, ended: Callable[[Event], None]
    ) -> None:
        """Begin a message, or compute of a role, now; `ended` is called at its end."""
        now, pool = self.env.now, self.pool
        activity = pool.compute(role, seconds, now) if flow is None else pool.message(flow, now)
        self.ends[activity] = ended, role
        self._look(activity, activity.left / activity.rate)

    def _look(self, activity: Activity, after: float) -> None:
        activity.look = activity.end
        timer = Timeout(self.env, after)
        timer.callbacks.append(partial(self._due, activity, activity.look))

    def _sooner(self, activity: Activity) -> None:
        self._look(activity, activity.end - self.env.now)

    def _due(self, activity: Activity, at: float, timer: Event) -> None:
        if activity.look != at or activity not in self.ends:
            return
        if activity.end > at:
            self._look(activity, activity.end - self.env.now)
            return
        ended, role = self.ends.pop(activity)
        if isinstance(activity, RunningMessage):
            self.pool.arrived(activity, self.env.now)
        else:
            self.pool.computed(role)
        ended(timer)


def run_engine(
    prepared: Prepared,
    durations: Sequence[float],
    *,
    latency: float = 0.0,
    issue: float = 0.0,
    launches: Sequence[float] = (),
    steps: int = 1,
    flows: Sequence[Flow] | None = None,
    inside: Mapping[int, Sequence[TimedPiece]] | None = None,
) -> list[Times]:
    """Return the times of each of `steps` steps that follow each other without a barrier.

    They are seconds since the start of the first step. `durations` are per node, a group taking that of its first
    member; `latency` is that of a point-to-point transfer, `issue` is the host's per instruction, before `launches` per
    node. `flows` give for each group its load on links and devices, and its duration (0 for that in `durations`); None:
    nothing is shared. `inside` has the pieces of the nodes with messages inside of their steps, which share links like
    others.
    """
    n = len(prepared)
    times = [
        Times([0.0] * n, [0.0] * n, [0.0] * n, [0.0] * n, [0.0] * len(prepared.roles))
        for _ in range(steps)
    ]
    work = _Work(prepared, durations, latency, issue, launches, flows, inside or {})
    engine = _Engine(work, steps, times)
    engine.start()
    engine.env.run()
    engine.finish()
    engine.drop()
    return times


def period(
    prepared: Prepared,
    durations: Sequence[float],
    flows: Sequence[Flow],
    *,
    latency: float,
    issue: float,
    launches: Sequence[float] = (),
    inside: Mapping[int, Sequence[TimedPiece]] | None = None,
) -> float:
    """Return the period as `piper_ir.fold.steady_state.period` does, but under contention.

    Steps run until they repeat, to 1e-9. They count as long as every stream has more to come, since afterwards there is
    less to share with. If a stream runs so far ahead that hardly any step is left, all count.
    """
    if not prepared.streams:
        return 0.0
    work = _Work(prepared, durations, latency, issue, launches, flows, inside or {})
    host = max([ends[0] for _, ends in _Engine(work, 1, ()).hosts], default=0.0)
    for steps in PERIOD_STEPS:
        engine = _Engine(work, steps, ())
        ends = _StepEnds(engine.env, len(prepared.streams), steps, host)
        engine.start(ends)
        engine.env.run(until=ends.known)
        engine.drop()
        if ends.period_s is not None:
            return ends.period_s
    return later_half(ends.counted if len(ends.counted) > steps // 2 else ends.rows, host)


class _StepEnds:
    """Collect when each stream has ended each step, until steps repeat or all have ended.

    Attributes:
        rows: by step, the end of each stream.
        counted: the first of these, as long as every stream had more to come when a step had ended everywhere.
        known: happens when nothing more will be learnt.
        period_s: the seconds per step once they repeat.
    """

    def __init__(self, env: Environment, streams: int, steps: int, host: float) -> None:
        self.env, self.host = env, host
        self.rows = [[0.0] * streams for _ in range(steps)]
        self.counted: list[list[float]] = []
        self.known = Event(env)
        self.period_s: float | None = None
        self._left = [streams] * steps
        self._out = float("inf")  # when the first stream ended its last step

    def ended(self, stream: int, step: int) -> None:
        """Record that a stream has now ended a step."""
        if self.known.triggered:
            return
        now, final = self.env.now, step + 1 == len(self.rows)
        self.rows[step][stream] = now
        self._left[step] -= 1
        if final:
            self._out = min(self._out, now)
        if self._left[step]:
            return
        if now <= self._out:
            self.counted.append(self.rows[step])
            self.period_s = steady(self.counted, self.host, tolerance=1e-9)
        if final or self.period_s is not None:
            self.known.succeed()


@dataclass(slots=True, eq=False)
class _Counter:
    """Count the finished instructions of a stream, remember the times, and wake the waiters for a number.

    `pending` has the ones that have ended and are not done, oldest first, each with whether it is itself under way.
    """

    at: array[float] = field(default_factory=lambda: array("d"))
    waiting: dict[int, list[Event]] = field(default_factory=dict)
    pending: deque[bool] = field(default_factory=deque)

    def count(self, now: float) -> None:
        self.at.append(now)
        if self.waiting:
            for event in self.waiting.pop(len(self.at), ()):
                event.succeed()

    def wake(self, number: int, env: Environment, go: Callable[[Event], None]) -> None:
        """Call `go` when the count reaches a number."""
        event = Event(env)
        event.callbacks.append(go)
        self.waiting.setdefault(number, []).append(event)

    def depart(self, env: Environment, latency: float) -> None:
        """Let a transfer leave the stream free for the next, and reach its waiters later."""
        self.pending.append(True)
        arrival = Timeout(env, latency)
        arrival.callbacks.append(lambda _: self._arrive(env.now))

    def _arrive(self, now: float) -> None:
        """Count the oldest transfer under way as arrived, with everything behind it that only had to keep the order."""
        self.pending.popleft()
        self.count(now)
        while self.pending and not self.pending[0]:
            self.pending.popleft()
            self.count(now)


@dataclass(slots=True, eq=False)
class _Meeting:
    """Start a group of nodes together: the last to come runs it and lets the others go."""

    env: Environment
    size: int
    p2p: bool
    came: int = 0
    start: float = 0.0
    gate: Event | None = None

    def come(self) -> Event | None:
        """Return the event to wait for; None for the last, who must run the group."""
        self.came += 1
        if self.came == self.size:
            return None
        if self.gate is None:
            self.gate = Event(self.env)
        return self.gate

    def end(self, start: float) -> None:
        """End the group, which ran from `start` to now, and reset the meeting for the next step."""
        gate, self.gate, self.came, self.start = self.gate, None, 0, start
        if gate is not None:
            gate.succeed()


_Need = tuple[_Counter, int, int]
"""A counter and the number that it must reach, which grows by the third entry with each step."""


class _Stream:
    """Run the instructions of one stream of a role, one after the other.

    Attributes:
        nodes: by instruction its node; likewise `needs`, `seconds` (its duration), `flows` (its load on links) and
            `meetings` (its group's).
        done: counts the instructions that waiters have seen done.
        at: the index of the instruction that is next or runs, in step `step`.
        began: when it began.
    """

    def __init__(self, engine: _Engine, index: int) -> None:
        self.engine, self.index, self.env = engine, index, engine.env
        nodes = self.nodes = engine.prepared.streams[index]
        self.role = engine.role_of(nodes[0])
        self.issued, self.size = (
            engine.issued[self.role] if engine.issued else None,
            engine.instructions(self.role),
        )
        self.first = engine.prepared.offsets[self.role]
        self.needs = engine.needs(nodes)
        self.seconds, self.flows, self.meetings = engine.work(nodes)
        self.done = engine.counters[index]
        self.at = self.step = 0
        self.began = 0.0
        self.times = engine.times[0] if engine.times else None

    def go(self, _: Event | None = None) -> None:
        """Go on until something must be waited for, which then calls this again."""
        while self.at < len(self.nodes) or self._next_step():
            at, node, ready = self.at, self.nodes[self.at], 0.0
            if self.issued is not None:
                ready = self.issued[node - self.first + self.step * self.size]
                if ready > self.env.now:
                    self._wait_until(ready)
                    return
            for counter, k, per_step in self.needs[at]:
                if target := k + self.step * per_step:
                    if len(counter.at) < target:
                        counter.wake(target, self.env, self.go)
                        return
                    ready = max(ready, counter.at[target - 1])
            if self.times is not None:
                self.times.ready[node] = ready
            meeting, duration = self.meetings[at], self.seconds[at]
            if meeting is not None and (gate := meeting.come()) is not None:
                gate.callbacks.append(self._met)
                return
            self.began = self.env.now
            if not duration:
                self._end()
            elif self.engine.shared is None:
                Timeout(self.env, duration).callbacks.append(self._ended)
                return
            else:
                pieces = self.engine.inside.get(node) or ((duration, self.flows[at]),)
                self.engine.shared.run(self.role, pieces, self._ended)
                return

    def _next_step(self) -> bool:
        """Begin the next step, if there is one."""
        self.at, self.step = 0, self.step + 1
        if self.times is not None and self.step < self.engine.steps:
            self.times = self.engine.times[self.step]
        return self.step < self.engine.steps

    def _wait_until(self, moment: float) -> None:
        """Go on at a moment, to the bit: a sum of floats is exact if neither is more than the other, or is 0."""
        now = self.env.now
        wait = moment - now
        Timeout(self.env, wait if wait <= now or not now else 0.75 * wait).callbacks.append(self.go)

    def _ended(self, _: Event) -> None:
        self._end()
        self.go()

    def _end(self) -> None:
        """End an instruction that this stream has run."""
        meeting = self.meetings[self.at]
        if meeting is not None:
            meeting.end(self.began)
        self._leave(meeting)

    def _met(self, _: Event) -> None:
        """End an instruction that another member of its group has run."""
        meeting = self.meetings[self.at]
        assert meeting is not None, "only groups have a gate"
        self.began = meeting.start
        self._leave(meeting)
        self.go()

    def _leave(self, meeting: _Meeting | None) -> None:
        """Leave the stream to the next instruction; a transfer arrives later."""
        now, engine = self.env.now, self.engine
        if self.times is not None:
            node = self.nodes[self.at]
            self.times.start[node], self.times.end[node] = self.began, now
        if meeting is not None and meeting.p2p and engine.latency:
            self.done.depart(self.env, engine.latency)
        elif self.done.pending:
            self.done.pending.append(False)
        else:
            self.done.count(now)
        self.at += 1
        if engine.ends is not None and self.at == len(self.nodes):
            engine.ends.ended(self.index, self.step)


@dataclass(frozen=True, slots=True)
class _Work:
    """Hold the work of each step; see `run_engine` for the fields."""

    prepared: Prepared
    durations: Sequence[float]
    latency: float
    issue: float
    launches: Sequence[float]
    flows: Sequence[Flow] | None
    inside: Mapping[int, Sequence[TimedPiece]]


class _Engine:
    """Hold the streams of a plan and their shared state; `times` has an entry per step, or none."""

    def __init__(self, work: _Work, steps: int, times: Sequence[Times]) -> None:
        self.env = Environment()
        prepared = self.prepared = work.prepared
        self.durations, self.latency, self.inside = work.durations, work.latency, work.inside
        self.steps, self.times = steps, times
        shares = work.flows is not None
        self.flows: Sequence[Flow | None] = work.flows or [None] * len(prepared.groups)
        self.shared = SharedActivities(self.env, len(prepared.roles)) if shares else None
        self.ends: _StepEnds | None = None
        self.streams: list[_Stream] = []
        self.counters = [_Counter() for _ in prepared.streams]
        hosted = work.issue or any(work.launches)
        self.hosts = [self._host(work, r) for r in range(len(prepared.roles) if hosted else 0)]
        self.issued = [issued for issued, _ in self.hosts]
        groups = zip(prepared.groups, prepared.p2p)
        self.meetings = [
            _Meeting(self.env, len(g), p2p) if len(g) > 1 else None for g, p2p in groups
        ]
        self.place = array("q", [0]) * len(prepared)  # of a node on its stream, counted from 1
        for nodes in prepared.streams:
            for k, node in enumerate(nodes, 1):
                self.place[node] = k

    def _host(self, work: _Work, r: int) -> tuple[list[float], list[float]]:
        """Return when a host has issued each instruction of each step, and when each step."""
        issued: list[float] = []
        ends: list[float] = []
        begun = 0.0
        for _ in range(self.steps):
            clock = 0.0
            for node in range(self.prepared.offsets[r], self.prepared.offsets[r + 1]):
                launch = work.launches[node] if work.launches else 0.0
                clock += work.issue + launch
                issued.append(begun + (clock - min(launch, work.durations[node])))
            begun += clock
            ends.append(begun)
        return issued, ends

    def start(self, ends: _StepEnds | None = None) -> None:
        """Let all streams go, in plan order."""
        self.ends = ends
        self.streams = [_Stream(self, s) for s in range(len(self.counters))]
        for stream in self.streams:
            stream.go()

    def drop(self) -> None:
        """Drop the large objects: events that are left hold the streams, which hold each other."""
        for stream in self.streams:
            stream.needs, stream.seconds, stream.flows, stream.meetings = [], [], [], []
        self.streams, self.counters, self.meetings, self.place = [], [], [], array("q")

    def instructions(self, r: int) -> int:
        """Return how many instructions a role has."""
        return self.prepared.offsets[r + 1] - self.prepared.offsets[r]

    def role_of(self, node: int) -> int:
        """Return the index of a node's role."""
        return bisect_right(self.prepared.offsets, node) - 1

    def work(
        self, nodes: Sequence[int]
    ) -> tuple[list[float], list[Flow | None], list[_Meeting | None]]:
        """Return for each node its duration (of its group's first), its load, and its group's meeting, if any."""
        group_of, groups, durations = self.prepared.group_of, self.prepared.groups, self.durations
        own = [group_of[node] for node in nodes]
        seconds = [durations[node if g < 0 else groups[g][0]] for node, g in zip(nodes, own)]
        return (
            seconds,
            [None if g < 0 else self.flows[g] for g in own],
            [None if g < 0 else self.meetings[g] for g in own],
        )

    def needs(self, nodes: Sequence[int]) -> list[tuple[_Need, ...]]:
        """Return the needs of each node of a stream."""
        prepared = self.prepared
        before = after_updates(prepared).get(nodes[0])
        needed = [
            tuple([self._need(w, self.place[w]) for w in prepared.waits[node]]) for node in nodes
        ]
        if before is not None:  # the last that is computed in the step before
            needed[0] += (self._need(before, 0),)
        return needed

    def _need(self, node: int, place: int) -> _Need:
        s = self.prepared.stream_of[node]
        return self.counters[s], place, len(self.prepared.streams[s])

    def finish(self) -> None:
        """Enter into the times when nodes were done, and when hosts had issued everything."""
        for step, times in enumerate(self.times):
            for counter, nodes in zip(self.counters, self.prepared.streams):
                done = counter.at[step * len(nodes) : (step + 1) * len(nodes)]
                for node, at in zip(nodes, done, strict=True):
                    times.done[node] = at
            for r, (_, ends) in enumerate(self.hosts):
                times.host[r] = ends[step]
