"""Run plans by events: one SimPy process per stream of each role, and one per host.

The rules are those of `piper_ir.timing`, which sweeps the same plan in a fixed order instead; a property test holds the
two against each other. With `flows`, what runs at the same time slows each other down: an instruction then takes its
duration only where nothing else runs beside it (`piper_simulator.contention.rates`). The sweep has no contention.

The engine is deterministic: processes start in plan order, and SimPy handles events of one moment in the order in which
they were made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from simpy import Environment, Event
from simpy.events import Timeout

from piper_ir.steady_state import host_seconds, later_half, steady
from piper_ir.timing import Prepared, Times, after_updates
from piper_simulator.contention.loads import Piece
from piper_simulator.contention.rates import Activity, Flow, RunningMessage, SharedPool

Running = Generator[Event, None, None]


def run_engine(
    prepared: Prepared,
    durations: Sequence[float],
    *,
    latency: float = 0.0,
    issue: float = 0.0,
    steps: int = 1,
    flows: Sequence[Flow] | None = None,
    inside: Mapping[int, Sequence[Piece]] | None = None,
) -> list[Times]:
    """Return the times of each of `steps` steps that follow each other without a barrier.

    They are seconds since the start of the first step. `durations` are per node, a group taking that of its first
    member; `latency` is that of a point-to-point transfer, `issue` is per instruction. `flows` give for each group its
    load on links and devices, and its duration (0 for that in `durations`); None: nothing is shared. `inside` has the
    pieces of the nodes with messages inside of their steps, which share links like others.
    """
    engine = _Engine(prepared, durations, latency, issue, steps, flows, inside or {})
    engine.env.run()
    return engine.finish()


PERIOD_STEPS = 6, 16
"""The numbers of steps that are run to see them repeat, first the one, then the other."""


def period(
    prepared: Prepared,
    durations: Sequence[float],
    flows: Sequence[Flow],
    *,
    latency: float,
    issue: float,
    inside: Mapping[int, Sequence[Piece]] | None = None,
) -> float:
    """Return the period as `piper_ir.steady_state.period` does, but under contention.

    Steps run until they repeat, to 1e-9. They count as long as every stream has more to come, since afterwards there is
    less to share with. Where a stream runs so far ahead that hardly any step is left, all count.
    """
    last = [nodes[-1] for nodes in prepared.streams]
    host = host_seconds(prepared, issue)
    if not last:
        return 0.0
    for steps in PERIOD_STEPS:
        times = run_engine(prepared, durations, latency=latency, issue=issue, steps=steps, flows=flows, inside=inside)
        ends = [[t.end[x] for x in last] for t in times]
        history = [row for row in ends if max(row) <= min(ends[-1])]
        for n in range(1, len(history) + 1):
            if (found := steady(history[:n], host, tolerance=1e-9)) is not None:
                return found
    return later_half(history if len(history) > len(ends) // 2 else ends, host)


@dataclass(slots=True, eq=False)
class _Counter:
    """Count up, remember the times, and wake those who wait for a number."""

    at: list[float] = field(default_factory=list)
    waiting: dict[int, list[Event]] = field(default_factory=dict)

    def count(self, now: float) -> None:
        self.at.append(now)
        if self.waiting:
            for event in self.waiting.pop(len(self.at), ()):
                event.succeed()


@dataclass(slots=True, eq=False)
class _Stream(_Counter):
    """Count the finished instructions of a stream for its waiters.

    `pending` has those that have ended and are not done, oldest first, each with whether it is itself under way.
    """

    pending: deque[bool] = field(default_factory=deque)

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
    flow: Flow | None = None
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


class _Shared:
    """Run activities at the rates of a pool.

    A timer whose activity became slower looks again at its new end; a timer after which a nearer one was set does
    nothing.
    """

    def __init__(self, env: Environment, roles: int) -> None:
        self.env = env
        self.pool = SharedPool(roles, self._sooner)
        self.ends: dict[Activity, tuple[Event, int]] = {}

    def begin(self, role: int, seconds: float, flow: Flow | None) -> Event:
        """Begin a message, or compute of a role, now; return the event of its end."""
        now, pool = self.env.now, self.pool
        activity = pool.compute(role, seconds, now) if flow is None else pool.message(flow, now)
        event = Event(self.env)
        self.ends[activity] = event, role
        self._look(activity, activity.left / activity.rate)
        return event

    def _look(self, activity: Activity, after: float) -> None:
        activity.look = activity.end
        timer = Timeout(self.env, after)
        timer.callbacks.append(partial(self._due, activity, activity.look))

    def _sooner(self, activity: Activity) -> None:
        self._look(activity, activity.end - self.env.now)

    def _due(self, activity: Activity, at: float, _: Event) -> None:
        if activity.look != at or activity not in self.ends:
            return
        if activity.end > at:
            self._look(activity, activity.end - self.env.now)
            return
        event, role = self.ends.pop(activity)
        if isinstance(activity, RunningMessage):
            self.pool.arrived(activity, self.env.now)
        else:
            self.pool.computed(role)
        event.succeed()


class _Engine:
    def __init__(
        self,
        prepared: Prepared,
        durations: Sequence[float],
        latency: float,
        issue: float,
        steps: int,
        flows: Sequence[Flow] | None,
        inside: Mapping[int, Sequence[Piece]],
    ) -> None:
        self.env = Environment()
        self.inside = inside
        self.prepared, self.durations, self.latency, self.issue = prepared, durations, latency, issue
        n = len(prepared)
        self.times = [Times([0.0] * n, [0.0] * n, [0.0] * n, [0.0] * n, [0.0] * len(prepared.roles)) for _ in range(steps)]
        self.streams = [_Stream() for _ in prepared.streams]
        self.hosts = [_Counter() for _ in prepared.roles]
        self.meetings = [_Meeting(self.env, len(g), p2p) for g, p2p in zip(prepared.groups, prepared.p2p)]
        self.shared = None if flows is None else _Shared(self.env, len(prepared.roles))
        for meeting, flow in zip(self.meetings, flows or ()):
            meeting.flow = flow
        self.place = [0] * n  # of a node on its stream, counted from 1
        for nodes in prepared.streams:
            for k, node in enumerate(nodes, 1):
                self.place[node] = k
        if issue:
            for r in range(len(self.hosts)):
                self.env.process(self._host(r, steps))
        for s in range(len(self.streams)):
            self.env.process(self._stream(s))

    def _host(self, r: int, steps: int) -> Running:
        for _ in range(self._instructions(r) * steps):
            yield Timeout(self.env, self.issue)
            self.hosts[r].count(self.env.now)

    def _instructions(self, r: int) -> int:
        return self.prepared.offsets[r + 1] - self.prepared.offsets[r]

    def _stream(self, s: int) -> Running:
        env, stream, latency, shared = self.env, self.streams[s], self.latency, self.shared
        nodes = self.prepared.streams[s]
        role = self._role(nodes)
        table = list(zip(nodes, self._needs(nodes), *self._work(nodes)))
        for step, times in enumerate(self.times):
            for node, needs, duration, meeting in table:
                ready = 0.0
                for counter, k, per_step in needs:
                    target = k + step * per_step
                    if not target:
                        continue
                    if len(counter.at) < target:
                        event = Event(env)
                        counter.waiting.setdefault(target, []).append(event)
                        yield event
                    at = counter.at[target - 1]
                    if at > ready:
                        ready = at
                times.ready[node] = ready
                if meeting is None:
                    times.start[node] = env.now
                    if shared is not None and node in self.inside:
                        for seconds, flow in self.inside[node]:
                            yield shared.begin(role, seconds, flow)
                    elif duration:
                        yield Timeout(env, duration) if shared is None else shared.begin(role, duration, None)
                elif (gate := meeting.come()) is not None:
                    yield gate
                    times.start[node] = meeting.start
                else:
                    times.start[node] = env.now
                    if duration:
                        yield Timeout(env, duration) if shared is None else shared.begin(role, duration, meeting.flow)
                    meeting.end(times.start[node])
                times.end[node] = env.now
                if latency and meeting is not None and meeting.p2p:
                    stream.depart(env, latency)
                elif stream.pending:
                    stream.pending.append(False)
                else:
                    stream.count(env.now)

    def _role(self, nodes: Sequence[int]) -> int:
        return next(r for r, after in enumerate(self.prepared.offsets[1:]) if nodes[0] < after)

    def _work(self, nodes: Sequence[int]) -> tuple[list[float], list[_Meeting | None]]:
        """Return for each node its duration and its group's meeting; all members have the duration of the first."""
        group_of, groups = self.prepared.group_of, self.prepared.groups
        durations = [self.durations[node if group_of[node] < 0 else groups[group_of[node]][0]] for node in nodes]
        return durations, [None if group_of[node] < 0 else self.meetings[group_of[node]] for node in nodes]

    def _needs(self, nodes: Sequence[int]) -> list[list[tuple[_Counter, int, int]]]:
        """Return for each node the counters that must reach a number, which grows by the third entry with each step."""
        prepared = self.prepared
        role = self._role(nodes)
        first, size = prepared.offsets[role], self._instructions(role)
        before = after_updates(prepared).get(nodes[0])
        out: list[list[tuple[_Counter, int, int]]] = []
        for node in nodes:
            needs: list[tuple[_Counter, int, int]] = [(self.hosts[role], node - first + 1, size)] if self.issue else []
            for w in prepared.waits[node]:
                s = prepared.stream_of[w]
                needs.append((self.streams[s], self.place[w], len(prepared.streams[s])))
            if node == nodes[0] and before is not None:  # the last that is computed in the step before
                s = prepared.stream_of[before]
                needs.append((self.streams[s], 0, len(prepared.streams[s])))
            out.append(needs)
        return out

    def finish(self) -> list[Times]:
        for step, times in enumerate(self.times):
            for s, nodes in enumerate(self.prepared.streams):
                times_done = self.streams[s].at[step * len(nodes) : (step + 1) * len(nodes)]
                for node, at in zip(nodes, times_done, strict=True):
                    times.done[node] = at
            if self.issue:
                for r, host in enumerate(self.hosts):
                    upto = (step + 1) * self._instructions(r)
                    times.host[r] = host.at[upto - 1] if upto else 0.0
        return self.times
