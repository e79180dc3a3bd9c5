"""Order F, I and W as the software of Zero Bubble pipelines does, which published runs of ZB-1P and ZB-2P used.

`recipes.zero_bubble` searches longer and finds other orders, often better ones, that hold less memory. This is the
heuristic of the paper (Qi et al., arXiv 2401.10241, section 3.2) with the choices of its software
(sail-sg/zero-bubble-pipeline-parallelism before 77b9eed9 of December 2023, pipeline_parallel/auto_schedule.py), by
which all stages are alike: they take the median stage's seconds, and hold as much for a microbatch as each other.

1. Until the first I can run, a stage runs as many forwards as fit in its memory, and more of them than the next stage.
2. Then F and I take turns. W fills waits, and makes room for a forward.
3. Three choices are open; of the eight orders the one with the shortest busiest device is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from statistics import median_high
from typing import Literal

from piper_compiler import recipes

DeviceOrders = tuple[tuple[tuple[recipes.Action], ...], ...]
"""The actions of each device in order, each one in a slot of its own."""

_F, _I, _W = range(3)
_PHASES: tuple[Literal["F", "I", "W"], ...] = ("F", "I", "W")


@dataclass(frozen=True)
class OpenChoices:
    """Hold the choices that the heuristic leaves open.

    Attributes:
        early_gap: the last forward before the first I must end before it arrives, though the stage then waits.
        skips: a stage that is ahead may leave out a forward, so that its I runs sooner.
        fills: a W runs in a wait shorter than itself also where another stage has waited longer.
    """

    early_gap: bool
    skips: bool
    fills: bool


def held_bytes(hidden: int, heads: int, seq: int) -> tuple[float, float]:
    """Return the bytes of a token in a layer from F to I, and from I to W, as that software estimates them."""
    return 34 * hidden + 5 * heads * seq, 32 * hidden


@lru_cache(maxsize=64)
def zero_bubble_order(
    times: tuple[Sequence[float], Sequence[float], Sequence[float]],
    hop: float,
    microbatches: int,
    memory: tuple[float, float],
    pending: int,
) -> DeviceOrders:
    """Return the order of each device.

    Args:
        times: F, I and W of the stages.
        hop: between two stages, in the same unit.
        microbatches: how many.
        memory: the bytes that a microbatch holds in a stage from F, and how many of them from I to W.
        pending: the limit of memory in microbatches: pp for ZB-1P, 2 pp for ZB-2P.
    """
    seconds = tuple(median_high(each) for each in times)
    found = [
        _Run(
            len(times[0]), seconds, hop, microbatches, memory, pending, OpenChoices(*choices)
        ).run()
        for choices in product((True, False), repeat=3)
    ]
    return min(found, key=lambda run: run.longest).orders


@dataclass
class _Run:
    """Hold one run of the heuristic: how many operations each stage has done, and until when."""

    stages: int
    seconds: tuple[float, ...]
    hop: float
    microbatches: int
    memory: tuple[float, float]
    pending: int
    choices: OpenChoices
    done: list[list[int]] = field(default_factory=list)
    ends: list[list[list[float]]] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    actions: list[list[recipes.Action]] = field(default_factory=list)

    def __post_init__(self) -> None:
        stages = self.stages
        self.done = [[0, 0, 0] for _ in range(stages)]
        self.ends = [[[], [], []] for _ in range(stages)]
        self.clock, self.held, self.waited = ([0.0] * stages for _ in range(3))
        self.actions = [[] for _ in range(stages)]

    @property
    def orders(self) -> DeviceOrders:
        return tuple(tuple((action,) for action in each) for each in self.actions)

    @property
    def longest(self) -> float:
        """Return the most seconds of a device from its first F to its last W."""
        return max(
            clock - (ends[_F][0] - self.seconds[_F])
            for clock, ends in zip(self.clock, self.ends, strict=True)
        )

    def run(self) -> _Run:
        stages = range(self.stages)
        for s in stages:
            self._put(s, _F)
        extra = self._warm_up()
        for s in stages:
            for _ in range(extra[s]):
                self._put(s, _F)
        for s in reversed(stages):
            self._put(s, _I)
        for _ in range(1, self.microbatches):
            takes = [self._takes_forward(s) for s in stages]
            for s in stages:
                if all(takes[s:]):
                    self._make_room(s)
                    self._fill(s, self._arrival(s, _F))
                    self._put(s, _F)
            for s in reversed(stages):
                self._fill(s, self._arrival(s, _I))
                if s == 0 and self.done[s][_F] == self.microbatches:
                    self._weights(s)
                self._put(s, _I)
        for s in stages:
            self._weights(s)
        return self

    def _put(self, s: int, phase: int) -> None:
        mb, before = self.done[s][phase], self.clock[s]
        start = max(before, self._arrival(s, phase))
        if self.done[s][_F]:
            self.waited[s] += start - before
        self.clock[s] = start + self.seconds[phase]
        self.ends[s][phase].append(self.clock[s])
        whole, kept = self.memory
        self.held[s] += (whole, kept - whole, -kept)[phase]
        self.done[s][phase] += 1
        self.actions[s].append(recipes.Action(s, _PHASES[phase], mb))

    def _arrival(self, s: int, phase: int) -> float:
        """Return when the input of a stage's next F or I is there."""
        source = {_F: s - 1, _I: s + 1}.get(phase, -1)
        if not 0 <= source < self.stages:
            return 0.0
        return self.ends[source][phase][self.done[s][phase]] + self.hop

    def _warm_up(self) -> list[int]:
        """Return how many forwards a stage runs between its first one and its first I."""
        stages, extra = self.stages, [0] * self.stages
        gradient = self.clock[-1] + self.seconds[_I]
        for s in reversed(range(stages - 1)):
            clock, arrival = self.clock[s], gradient + self.hop
            ahead = self.seconds[_F] if self.choices.early_gap else 0.0
            while (
                extra[s] + 1 < self.microbatches
                and extra[s] + 2 <= self.pending
                and (clock + ahead <= arrival if ahead else clock < arrival)
            ):
                clock += self.seconds[_F]
                extra[s] += 1
            gradient = max(clock, arrival) + self.seconds[_I]
        for s in range(1, stages):
            if extra[s] + 1 < self.microbatches:
                extra[s] = max(0, min(extra[s], extra[s - 1] - 1))
        return extra

    def _takes_forward(self, s: int) -> bool:
        """Return whether a stage runs an F before its next I."""
        done, after = self.done, s + 1
        if done[s][_F] == self.microbatches:
            return False
        if not self.choices.skips or after == len(done) or done[s][_F] < done[after][_F] + 2:
            return True
        ready = self.clock[after] + self.seconds[_F] + self.seconds[_I] + self.hop
        if self.clock[s] >= ready:
            return False
        over, freed = self._over(s), 0
        while over > 0 and freed < done[s][_I] - done[s][_W]:
            over -= self.memory[1]
            freed += 1
        if self.clock[s] + self.seconds[_F] + freed * self.seconds[_W] <= ready:
            return True
        return ready - self.clock[s] > max(self.waited) - self.waited[s]

    def _make_room(self, s: int) -> None:
        while self._over(s) > 0 and self._pending(s):
            self._put(s, _W)

    def _over(self, s: int) -> float:
        """Return the bytes that another F would take beyond the limit."""
        return self.held[s] + self.memory[0] * (1 - self.pending)

    def _fill(self, s: int, arrival: float) -> None:
        """Run weight gradients until the next input arrives."""
        while self._pending(s) and self.clock[s] + self.seconds[_W] <= arrival:
            self._put(s, _W)
        if self._pending(s) and self.clock[s] < arrival:
            slack = max(self.waited) - self.waited[s]
            if self.choices.fills or arrival - self.clock[s] > slack:
                self._put(s, _W)

    def _weights(self, s: int) -> None:
        while self._pending(s):
            self._put(s, _W)

    def _pending(self, s: int) -> bool:
        return self.done[s][_W] < self.done[s][_I]
