"""Handle events in the order of their moments, and events of one moment in the order in which they were made."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

MadeAt = tuple[float, float, float]
"""The moments at which an event was made, the event that made it was, and the one that made that was."""
EventKey = tuple[float, float, float, float, int]
"""The place of an event in the order of all: its moment, its `MadeAt`, and a number that grows with each event."""


class EventClock:
    """Hold events that are to come, and the moment `now`, in seconds since the start.

    Events of one moment are handled in the order in which they were made. An event that stands for the last of several
    that follow each other (`piper_simulator.times.shared_activities`) is made when the first of them is. Its place is
    that which it would have if each made the next, so its key has the times at which they would.

    Attributes:
        key: the place of the event that is handled now.
    """

    __slots__ = ("_events", "_made", "_pushed", "key", "now", "stopped")

    def __init__(self) -> None:
        self.now = 0.0
        self.key: EventKey = (0.0, 0.0, 0.0, 0.0, -1)
        self.stopped = False
        self._events: list[tuple[EventKey, int, Callable[[], None]]] = []
        self._made = self._pushed = 0

    @property
    def made(self) -> MadeAt:
        """Return the times of an event that is made now."""
        return self.key[:3]

    def number(self) -> int:
        """Return the number of the next event."""
        self._made += 1
        return self._made

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function some seconds from now."""
        self._made = order = self._made + 1
        self._pushed = pushed = self._pushed + 1
        moment, made, before, _, _ = self.key
        key = self.now + seconds, moment, made, before, order
        heappush(self._events, (key, pushed, call))

    def push(self, key: EventKey, call: Callable[[], None]) -> None:
        """Call a function at the moment and in the place of a key."""
        self._pushed = pushed = self._pushed + 1
        heappush(self._events, (key, pushed, call))

    def run(self) -> None:
        """Handle events until none is left, or `stopped` is set."""
        events = self._events
        while events and not self.stopped:
            self.key, _, call = heappop(events)
            self.now = self.key[0]
            call()

    def drop(self) -> None:
        """Drop the events that are left."""
        self._events.clear()
