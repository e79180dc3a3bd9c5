"""Say which instructions of a role are done before others start, by the guarantees of streams and waits."""

from __future__ import annotations

from piper_ir.plan.plan import RolePlan


class HappensBefore:
    """Say which instructions of a role happen before which others, by stream order and waits, closed transitively.

    Each instruction has a vector clock: how many instructions of each stream are done when it is done. The order in
    which the host issues does not count: a device runs ahead of or behind it.
    """

    def __init__(self, role: RolePlan) -> None:
        columns = {stream: c for c, stream in enumerate(role.streams)}
        streams: list[list[int]] = [[] for _ in columns]
        self._done: list[list[int]] = []
        self._column: list[int] = []
        self._position: list[int] = []
        for index, instr in enumerate(role.program):
            c = columns[instr.stream]
            own = streams[c]
            clock = self._done[own[-1]].copy() if own else [0] * len(columns)
            for stream, count in instr.waits:
                clock = list(map(max, clock, self._done[streams[columns[stream]][count - 1]]))
            clock[c] = len(own) + 1
            self._done.append(clock)
            self._column.append(c)
            self._position.append(len(own))
            own.append(index)

    def precedes(self, first: int, second: int) -> bool:
        """Return whether instruction `first` is done whenever instruction `second` starts."""
        return first != second and self._done[second][self._column[first]] > self._position[first]
