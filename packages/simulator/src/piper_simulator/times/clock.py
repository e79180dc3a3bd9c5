"""Handle events in the order of their moments, and events of one moment in the order in which they were made."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

MadeAt = tuple[float, float, float]
"""The moments at which an event was made, the event that made it was, and the one that made that was."""
EventKey = tuple[float, float, float, float, int]
"""The place of an event in the order of all: its moment, its `MadeAt`, and a number that grows with each event."""
_Event = tuple[float, float, float, float, int, int, Callable[[], None]]


class EventClock:
    """Hold events that are to come, and the moment `now`, in seconds since the start.

    Events of one moment are handled in the order in which they were made. An event that stands for the last of several
    that follow each other (`piper_simulator.times.shared_activities`) is made when the first of them is. Its place is
    that which it would have if each made the next, so its key has the times at which they would.

    Attributes:
        event: the one that is handled now: its key, a number that orders events pushed with one key, and its function.
    """

    __slots__ = ("_events", "_made", "_pushed", "event", "now", "stopped")

    def __init__(self) -> None:
        self.now = 0.0
        self.event: _Event = (0.0, 0.0, 0.0, 0.0, -1, 0, self.drop)
        self.stopped = False
        self._events: list[_Event] = []
        self._made = self._pushed = 0

    @property
    def made(self) -> MadeAt:
        """Return the times of an event that is made now."""
        return self.event[:3]

    @property
    def key(self) -> EventKey:
        """Return the place of the event that is handled now."""
        return self.event[:5]

    def number(self) -> int:
        """Return the number of the next event."""
        self._made += 1
        return self._made

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function some seconds from now."""
        self._made = order = self._made + 1
        event = self.event
        heappush(self._events, (self.now + seconds, event[0], event[1], event[2], order, 0, call))

    def push(self, key: EventKey, call: Callable[[], None]) -> None:
        """Call a function at the moment and in the place of a key."""
        self._pushed = pushed = self._pushed + 1
        heappush(self._events, (*key, pushed, call))

    def run(self) -> None:
        """Handle events until none is left, or `stopped` is set."""
        events = self._events
        while events and not self.stopped:
            self.event = event = heappop(events)
            self.now = event[0]
            event[6]()

    def drop(self) -> None:
        """Drop the events that are left."""
        self._events.clear()
