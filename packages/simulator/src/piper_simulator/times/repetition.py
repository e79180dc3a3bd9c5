"""See when the steps of an engine repeat: states that agree go on alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from piper_ir.fold.steady_state import steady

TOLERANCE = 1e-9
"""The most by which steps that repeat may differ, as a fraction of a step."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """Hold where an engine is at a moment: engines whose states agree go on alike.

    Attributes:
        places: where streams stand in their step, and the activities under way.
        seconds: since when, as seen from the moment, and how much of it is left.
        hosts: by role, when its host began with the step, as seen from the moment.
        waited: by role, when it has last waited for its host.
    """

    now: float
    places: tuple[object, ...]
    seconds: list[float]
    hosts: list[float]
    waited: Mapping[int, float]

    def repeats(self, before: EngineState) -> bool:
        """Return whether it agrees with the one before; hosts for which nothing waited may be further ahead."""
        slack = TOLERANCE * (self.now - before.now)
        return (
            self.places == before.places
            and all(
                [abs(a - b) <= slack for a, b in zip(self.seconds, before.seconds, strict=True)]
            )
            and all([a <= b + slack for a, b in zip(self.hosts, before.hosts, strict=True)])
            and all(
                [
                    before.hosts[r] <= self.hosts[r] + slack
                    for r, waited in self.waited.items()
                    if waited >= before.now
                ]
            )
        )


class StepEnds:
    """Collect when each stream has ended each step, until steps repeat or all have ended.

    Attributes:
        rows: by step, the end of each stream.
        counted: the first of these, as long as every stream had more to come when a step had ended everywhere.
        known: whether nothing more will be learnt.
        period_s: the seconds per step once they repeat.
    """

    def __init__(self, streams: int, steps: int, host: float) -> None:
        self.host = host
        self.rows = [[0.0] * streams for _ in range(steps)]
        self.counted: list[list[float]] = []
        self.known = False
        self.period_s: float | None = None
        self._left = [streams] * steps
        self._out = float("inf")  # when the first stream ended its last step

    def seen(self, state: EngineState, before: EngineState) -> None:
        """Compare the states at a place in a step and in the step before."""
        if not self.known and state.repeats(before):
            self.known, self.period_s = True, state.now - before.now

    def ended(self, stream: int, step: int, now: float) -> None:
        """Record that a stream has ended a step."""
        if self.known:
            return
        final = step + 1 == len(self.rows)
        self.rows[step][stream] = now
        self._left[step] -= 1
        if final:
            self._out = min(self._out, now)
        if self._left[step]:
            return
        if now <= self._out:
            self.counted.append(self.rows[step])
            self.period_s = steady(self.counted, self.host, tolerance=TOLERANCE)
        if final or self.period_s is not None:
            self.known = True
