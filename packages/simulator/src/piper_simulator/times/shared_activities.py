"""Run activities that slow each other down by SimPy events, at the rates of a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from simpy import Environment, Event
from simpy.events import Timeout

from piper_simulator.contention.loads import TimedPiece
from piper_simulator.contention.rates import Activity, Flow, RunningMessage, SharedPool


class SharedActivities:
    """Run activities at the rates of a pool.

    A timer whose activity became slower looks again at its new end; a timer after which a nearer one was set does
    nothing.
    """

    def __init__(self, env: Environment, roles: int) -> None:
        self.env = env
        self.pool = SharedPool(roles, self._sooner)
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
