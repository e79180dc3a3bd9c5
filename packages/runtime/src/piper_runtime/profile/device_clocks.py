"""Measure how long a device is busy with closures: by the host's clock, or by events of a CUDA device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch

from piper_runtime.engine.core_waits import core_waits
from piper_runtime.rank.binding.parts import Thunk


class Clock(Protocol):
    """Time closures.

    `ahead` tells whether the host issues work before the device comes to it; earlier work then decides how far ahead it
    is.
    """

    ahead: bool

    def each(self, runs: Sequence[Thunk]) -> list[float]:
        """Run closures in order; return the seconds of each."""

    def all(self, run: Thunk) -> float:
        """Return the seconds of a closure until the device is done with it."""

    def sleep(self, seconds: float) -> None:
        """Let the host get at least `seconds` ahead of the device."""


class HostClock:
    """Time closures on the CPU: a closure is done when it returns.

    With `own_core` the time in which this thread waited for its turn on a core is left out. Other programs took it, and
    a measured duration holds for a rank with a core of its own.
    """

    ahead = False

    def __init__(self, own_core: bool = False) -> None:
        self._waited = core_waits() if own_core else lambda: 0.0

    def each(self, runs: Sequence[Thunk]) -> list[float]:
        return [self.all(run) for run in runs]

    def all(self, run: Thunk) -> float:
        waited, begin = self._waited(), time.perf_counter()
        run()
        took = time.perf_counter() - begin
        return max(0.0, took - (self._waited() - waited))

    def sleep(self, seconds: float) -> None:
        """Do nothing: a host is never ahead of itself."""


CYCLES_PER_S = 2.2e9
"""The cycles per second of a clock faster than that of any device today."""


class DeviceClock:
    """Time closures on a CUDA device: an event between any two closures, all read in the end.

    If the host is ahead of the device, as with long kernels, the time between two events is the device's; else it is
    the host's time to issue. So it is the time that the closure adds to a step with others before it.
    """

    ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[
            torch.cuda.Event
        ] = []  # made by the first record, which takes longer than another

    def each(self, runs: Sequence[Thunk]) -> list[float]:
        self._events += [
            torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1 - len(self._events))
        ]
        events = self._events[: len(runs) + 1]
        events[0].record()
        for run, event in zip(runs, events[1:]):
            run()
            event.record()
        torch.cuda.synchronize(self._device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]

    def all(self, run: Thunk) -> float:
        torch.cuda.synchronize(self._device)
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - begin

    def sleep(self, seconds: float) -> None:
        torch.cuda._sleep(round(seconds * CYCLES_PER_S))


def clock_of(device: torch.device, own_core: bool = False) -> Clock:
    """Return the clock for closures on a device; `own_core` is as in HostClock."""
    return HostClock(own_core) if device.type == "cpu" else DeviceClock(device)
