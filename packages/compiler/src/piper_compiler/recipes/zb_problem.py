"""Define the scheduling problem of a zero-bubble pipeline, and the worth of an order: its times and its memory.

An operation is an int: phase + 3 (stage + stages x microbatch), phases F, I, W being 0, 1, 2. A device is one machine;
an operation starts when its predecessor on the device has ended and its input has arrived, `hop` after it was made on
another device. W needs only the I of its own device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Queue = list[int]
"""The operations of one device, in order."""

FORWARD, INPUT, WEIGHT = 0, 1, 2
"""The phases F, I, W."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Hold the times and the memory of all stages.

    Stage s of chunk 0 is on device s; with two chunks stage 2p - 1 - r is on device r, too (V).

    Attributes:
        chunks: stages per device, 1 or 2.
        seconds: by stage, the seconds of F, I and W.
        activation: by stage, the memory that one microbatch keeps from the start of F to the end of W.
        kept: by stage, how much of that lives on from I to W.
        hop: seconds between two devices.
    """

    devices: int
    chunks: int
    seconds: tuple[tuple[float, float, float], ...]
    activation: tuple[float, ...]
    kept: tuple[float, ...]
    hop: float

    @property
    def home(self) -> list[int]:
        """Return the device of each stage."""
        p = self.devices
        return [s if s < p else 2 * p - 1 - s for s in range(len(self.seconds))]

    def of_devices(self) -> list[list[int]]:
        """Return the stages of each device, in order."""
        home = self.home
        return [[s for s, device in enumerate(home) if device == r] for r in range(self.devices)]

    def least(self) -> list[float]:
        """Return for each device the smallest legal memory limit: one microbatch on all of its stages."""
        need = [0.0] * self.devices
        for r, a in zip(self.home, self.activation, strict=True):
            need[r] += a
        return need


class Swept(NamedTuple):
    """Hold the times of an order.

    Attributes:
        end: the end of each operation.
        first: the first start on each device.
        last: the last end on each device.
    """

    end: list[float]
    first: list[float]
    last: list[float]


class OrderScore(NamedTuple):
    """Score an order; smaller is better.

    Attributes:
        makespan: seconds from start to end.
        span: the largest over devices of (last end - first start - busy).
        idle: the sum of that over devices.
    """

    makespan: float
    span: float
    idle: float

    def meets(self, goal: OrderScore) -> bool:
        """Return whether makespan and span are as small as the goal's."""
        return all(a <= b + 1e-9 * goal.makespan for a, b in zip(self[:2], goal[:2], strict=True))


@dataclass(slots=True)
class Problem:
    """Hold stages, a number of microbatches and a memory limit per device, as columns with one entry per operation."""

    stages: Stages
    microbatches: int
    limit: tuple[float, ...]
    count: int = 0
    seconds: list[float] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    lag: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Make the columns.

        They are by operation its `seconds`, its `device`, the operation that it `needs` and the one that comes `after`
        it (-1: none), the `lag` of its input, the `memory` that it adds; and by device the `busy` seconds.
        """
        pipeline, home = self.stages, self.stages.home
        n = len(home)
        self.count, self.busy = 3 * n * self.microbatches, [0.0] * pipeline.devices
        lag = [0.0] + [pipeline.hop * (home[s] != home[s - 1]) for s in range(1, n)]
        for k in range(self.microbatches):
            for s in range(n):
                at = 3 * (s + n * k)
                keep, after = pipeline.activation[s], pipeline.kept[s]
                self.seconds += pipeline.seconds[s]
                self.device += [home[s]] * 3
                self.after += (at + 3 if s < n - 1 else at + 1, at - 2 if s else -1, -1)
                self.needs += (at - 3 if s else -1, at + 4 if s < n - 1 else at, -1)
                self.lag += (lag[s], lag[s + 1] if s < n - 1 else 0.0, 0.0)
                self.memory += (keep, after - keep, -after)
                self.busy[home[s]] += sum(pipeline.seconds[s])

    @property
    def pace(self) -> float:
        """Return seconds that the slowest device needs for one microbatch."""
        return max(self.busy) / self.microbatches

    def stage(self, op: int) -> int:
        return op // 3 % len(self.stages.seconds)

    def microbatch(self, op: int) -> int:
        return op // 3 // len(self.stages.seconds)

    def sweep(self, orders: Sequence[Queue]) -> Swept | None:
        """Run every operation as early as its order allows; return None when the orders block each other."""
        seconds, needs, lag = self.seconds, self.needs, self.lag
        p, left = self.stages.devices, self.count
        end, clock, first, at = [-1.0] * self.count, [0.0] * p, [0.0] * p, [0] * p
        waiting: dict[int, int] = {}
        ready = list(range(p - 1, -1, -1))
        while ready:
            r = ready.pop()
            queue, i, now = orders[r], at[r], clock[r]
            while i < len(queue):
                op = queue[i]
                need = needs[op]
                if need >= 0:
                    if end[need] < 0:
                        waiting[need] = r
                        break
                    arrived = end[need] + lag[op]
                    if arrived > now:
                        now = arrived
                if not i:
                    first[r] = now
                now += seconds[op]
                end[op] = now
                if op in waiting:
                    ready.append(waiting.pop(op))
                i += 1
            left -= i - at[r]
            at[r], clock[r] = i, now
        return None if left else Swept(end, first, clock)

    def value(self, swept: Swept) -> OrderScore:
        spans = [b - a - c for a, b, c in zip(swept.first, swept.last, self.busy, strict=True)]
        return OrderScore(max(swept.last), max(spans), sum(spans))

    def fits(self, queue: Queue, limit: float) -> bool:
        """Return whether a device that runs the queue stays within the limit."""
        used, memory = 0.0, self.memory
        for op in queue:
            used += memory[op]
            if used > limit:
                return False
        return True

    def bound(self) -> float:
        """Return a time before which no order ends: a device's first possible arrival plus all its work."""
        arrival, bound = 0.0, 0.0
        for s in range(self.stages.devices):
            bound = max(bound, arrival + self.busy[s])
            arrival += self.stages.seconds[s][FORWARD] + self.stages.hop
        return bound
