"""Run activities that slow each other down by events, at the rates of a pool.

An instruction with messages inside of its steps is a *chain* of pieces: compute, a message, compute, ... The pieces run
one after the other; nobody waits for the end of one but the next. As long as no message beside the role begins, ends or
changes its rate, and no link of the chain's messages is short of capacity, their ends are a running sum. So only the
last of them is an event. When something changes, the chain finds the piece that runs by then, and plans the rest anew.
A message inside of the chain that would have to share a link runs as other messages do, with events of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Self

from piper_simulator.contention.loads import TimedPiece
from piper_simulator.contention.rates import Activity, Flow, RunningMessage, SharedPool
from piper_simulator.times.clock import EventClock, EventKey, MadeAt


class SharedActivities:
    """Run activities at the rates of a pool.

    A timer whose message became slower looks again at its new end; a timer after which a nearer one was set does
    nothing.

    Attributes:
        profiles: node -> the pieces of an instruction with messages inside of its steps.
        chains: by role, the last instruction of such pieces.
    """

    def __init__(self, clock: EventClock, roles: int, profiles: Mapping[int, PieceProfile]) -> None:
        self.clock, self.profiles = clock, profiles
        self.chains: list[PieceChain | None] = [None] * roles
        self.pool = SharedPool(roles, self._sooner)

    def compute(self, role: int, node: int, seconds: float, ended: Callable[[], None]) -> None:
        """Begin the compute of a node, with the messages inside, now; `ended` is called at its end."""
        profile = self.profiles.get(node)
        if profile is None:
            PlainCompute(self, role, seconds, ended)
        else:
            self.chains[role] = chain = PieceChain(self, role, profile, ended)
            chain.begin()

    def message(self, flow: Flow, ended: Callable[[], None]) -> None:
        """Begin a message now; `ended` is called at its end."""
        running = self.pool.message(flow, self.clock.now)
        running.ended = ended
        running.look = end = running.end
        self.clock.after(running.left / running.rate, partial(self._due, running, end))

    def under_way_at(self, now: float) -> tuple[list[object], list[float]]:
        """Return the activities under way, and since when and with how much left, as seen from a moment."""
        names: list[object] = [None if chain is None else chain.at for chain in self.chains]
        seconds: list[float] = []
        for name, activity in self.pool.under_way():
            names.append(name)
            seconds += activity.since - now, activity.left, activity.rate
        return names, seconds

    def under_way(
        self, message: RunningMessage, timer: EventKey, ended: Callable[[], None]
    ) -> None:
        """Let a message that has begun before go on by events, of which the next has this key."""
        message.ended = ended
        self.clock.push(timer, partial(self._due, message, message.look))

    def _sooner(self, activity: Activity) -> None:
        assert isinstance(activity, RunningMessage), "compute ends by itself"
        activity.look = end = activity.end
        self.clock.after(end - self.clock.now, partial(self._due, activity, end))

    def _due(self, message: RunningMessage, at: float) -> None:
        ended = message.ended
        if message.look != at or ended is None:
            return
        if message.end > at:
            self._sooner(message)
            return
        message.ended = None
        self.pool.arrived(message, self.clock.now)
        ended()


class PlainCompute(Activity):
    """Run an instruction without messages inside, from now on; `ended` is called at the end.

    A timer looks whether it has ended, and looks again at the new end if it became slower. The number of its event
    stays as long as the timer is not set to an earlier moment.
    """

    __slots__ = ("_key", "_owner", "_role", "ended")

    def __init__(
        self, owner: SharedActivities, role: int, seconds: float, ended: Callable[[], None]
    ) -> None:
        self._owner, self._role, self.ended = owner, role, ended
        clock = owner.clock
        self.left, self.since = seconds, clock.now
        self.rate = rate = owner.pool.enter(role, self)
        self.end = self.since + seconds / rate
        self._look(self.end, clock.made, clock.number())

    def change(self, rate: float, now: float) -> None:
        """Go on at another rate."""
        Activity.change(self, rate, now)
        if self.end < self.look:
            clock = self._owner.clock
            self._look(now + (self.end - now), clock.made, clock.number())

    def _look(self, moment: float, made: MadeAt, number: int) -> None:
        self.look = self.end
        self._key = key = (moment, *made, number)
        self._owner.clock.push(key, partial(self._due, key))

    def _due(self, key: EventKey) -> None:
        if key is not self._key:
            return
        moment, made, before, _, number = key
        if self.end > self.look:
            self._look(moment + (self.end - moment), (moment, made, before), number)
            return
        self._owner.pool.leave(self._role, None)
        self.ended()


class PieceProfile:
    """Hold the pieces of a role's instruction.

    Attributes:
        seconds: of each piece alone; likewise `flows`, the load of a message, None for compute.
        shared: the loads that use links which others use, too.
        apart: the ids of loads that slow other roles, whose messages must be events.
    """

    __slots__ = ("apart", "flows", "seconds", "shared")

    def __init__(self, pieces: Sequence[TimedPiece], role: int) -> None:
        self.seconds = [s for s, _ in pieces]
        self.flows = [flow for _, flow in pieces]
        loads = {flow.id: flow for flow in self.flows if flow is not None}
        self.shared = [flow for flow in loads.values() if flow.shares]
        self.apart = {id for id, flow in loads.items() if any(r != role for r in flow.takes)}

    def __deepcopy__(self, memo: Mapping[int, object]) -> Self:
        return self


class PieceChain(Activity):
    """Run the pieces of an instruction; `ended` is called at the end.

    The fields of Activity are of the piece that runs, or of the one that ran when the chain was last planned. `rate` is
    that of compute.

    Attributes:
        at: the index of that piece.
        ends: when it and the planned pieces behind it end.
        fires: when the timer of that piece looks whether it has ended, which it has not if it became slower.
        made: the times of that timer, with `order` its place among events (`EventClock`).
    """

    __slots__ = (
        "_key",
        "at",
        "ended",
        "ends",
        "fires",
        "made",
        "order",
        "owner",
        "profile",
        "role",
    )

    def __init__(
        self, owner: SharedActivities, role: int, profile: PieceProfile, ended: Callable[[], None]
    ) -> None:
        super().__init__(0.0, 0.0, 0.0)
        self.owner, self.role, self.profile, self.ended = owner, role, profile, ended
        self.at, self.ends, self.fires, self.order = 0, list[float](), 0.0, 0
        self.made: MadeAt = (0.0, 0.0, 0.0)
        self._key: EventKey | None = None

    def begin(self) -> None:
        """Begin the piece `at` now."""
        clock, pool = self.owner.clock, self.owner.pool
        now, flow = clock.now, self.profile.flows[self.at]
        seconds = self.profile.seconds[self.at]
        if flow is not None and (flow.id in self.profile.apart or pool.misfits(self, (flow,))):
            self.owner.message(flow, self._arrived)
            return
        if self.profile.shared:
            pool.hold(self, self.profile.shared)
        self.rate = rate = pool.enter(self.role, self)
        self.left, self.since = seconds, now
        self.end = self.look = self.fires = now + (seconds / rate if flow is None else seconds)
        self.made, self.order, self._key = clock.made, clock.number(), None
        self.plan()

    def change(self, rate: float, now: float) -> None:
        """Go on with compute at another rate."""
        self._catch_up()
        if self.profile.flows[self.at] is None:
            Activity.change(self, rate, now)
            if self.end < self.look:
                clock = self.owner.clock
                self.look, self.fires = self.end, now + (self.end - now)
                self.made, self.order = clock.made, clock.number()
        self.rate = rate
        self.plan()

    def give_way(self) -> RunningMessage | None:
        """Leave the arithmetic because another message needs a link; return the message that runs, if one does."""
        self._catch_up()
        flow = self.profile.flows[self.at]
        if flow is None:
            return None
        self._key = None
        self.owner.pool.leave(self.role, self)
        running = RunningMessage(self.left, self.since, self.end, 1.0, self.look, flow=flow)
        self.owner.under_way(running, (self.fires, *self.made, self.order), self._arrived)
        return running

    def plan(self) -> None:
        """Find the ends of the pieces from the one that runs on, up to one whose message must share a link."""
        seconds, flows, rate = self.profile.seconds, self.profile.flows, self.rate
        first = self.at + 1
        stop = self._stop(first)
        end, made = self.fires, self.made
        if self.end > self.look:
            end, made = end + (self.end - end), (end, made[0], made[1])
        if stop > first:
            rest = seconds[first:stop]
            if rate != 1.0:
                rest = [s / rate if flow is None else s for s, flow in zip(rest, flows[first:stop])]
            ends = self.ends = list(accumulate(rest, initial=end))
        else:
            ends = self.ends = [end]
        key = (*_times(ends, len(ends) - 1, made), self.order)
        if key != self._key:
            self._key = key
            self.owner.clock.push(key, partial(self._over, key))

    def _stop(self, first: int) -> int:
        """Return the first piece from `first` on that cannot be planned."""
        flows = self.profile.flows
        n = len(flows)
        if first < n and (misfits := self._misfits()):
            planned = (
                k for k in range(first, n) if (f := flows[k]) is not None and f.id in misfits
            )
            return next(planned, n)
        return n

    def _misfits(self) -> set[int]:
        """Return the ids of messages that must be events now."""
        profile = self.profile
        if not profile.shared:
            return profile.apart
        return profile.apart | self.owner.pool.misfits(self, profile.shared)

    def _over(self, key: EventKey) -> None:
        """Go on behind the planned pieces, if they are still planned as they were."""
        if key is not self._key:
            return
        self._key = None
        self.owner.pool.leave(self.role, self)
        self.at += len(self.ends)
        self._next()

    def _arrived(self) -> None:
        """Go on behind a message that shared a link."""
        self.at += 1
        self._next()

    def _next(self) -> None:
        if self.at < len(self.profile.flows):
            self.begin()
        else:
            self.ended()

    def _catch_up(self) -> None:
        """Find the piece that runs now, as of the events before the one that is handled now."""
        ends, clock = self.ends, self.owner.clock
        now, made = clock.now, self.made
        passed = bisect_left(ends, now, 0, len(ends) - 1)
        if self.end > self.look and (
            passed or _before(clock, (self.fires, *made, self.order))
        ):  # the timer has looked, and looks again at the new end
            self.made = made = (self.fires, made[0], made[1])
            self.look, self.fires = self.end, self.fires + (self.end - self.fires)
        while passed < len(ends) - 1 and _before(clock, (*_times(ends, passed, made), self.order)):
            passed += 1
        if passed:
            self.at += passed
            self.left, self.since = self.profile.seconds[self.at], ends[passed - 1]
            self.made = _times(ends, passed, made)[1:]
            self.end = self.look = self.fires = ends[passed]
            self.ends = ends[passed:]


def _times(ends: Sequence[float], k: int, made: MadeAt) -> tuple[float, float, float, float]:
    """Return the moment of the end of piece k, and when its event was made; `made` is of the first piece's."""
    if k > 2:
        return ends[k], ends[k - 1], ends[k - 2], ends[k - 3]
    before = (*ends[k::-1], *made)
    return before[0], before[1], before[2], before[3]


def _before(clock: EventClock, key: EventKey) -> bool:
    """Return whether an event comes before the one that is handled now."""
    return key < clock.key
