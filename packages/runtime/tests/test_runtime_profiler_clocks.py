"""How closures are timed, on a made-up CUDA device whose time passes by what it is given."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from piper_runtime.profiler_clocks import DeviceClock, HostClock, clock_of


class Device:
    """Seconds that the device has worked, and how many events were made."""

    def __init__(self) -> None:
        self.now, self.events = 0.0, 0

    def work(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            found.events += 1

        def record(self) -> None:
            self.at = found.now

        def elapsed_time(self, later: Event) -> float:
            return (later.at - self.at) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return found


def test_a_closure_takes_what_lies_between_two_events(device: Device) -> None:
    clock = clock_of(torch.device("cuda", 0))
    assert isinstance(clock, DeviceClock) and clock.ahead
    runs = [partial(device.work, s) for s in (1.0, 0.0, 2.5)]
    assert clock.each(runs) == [1.0, 0.0, 2.5]
    assert clock.each(runs[::-1]) == [2.5, 0.0, 1.0] and device.events == 4, "events are made once"
    assert clock.each(runs * 2) == [1.0, 0.0, 2.5] * 2 and device.events == 7


def test_on_the_cpu_the_host_has_the_time() -> None:
    clock = clock_of(torch.device("cpu"))
    ran: list[int] = []
    assert isinstance(clock, HostClock) and not clock.ahead
    assert all(s >= 0 for s in clock.each([partial(ran.append, k) for k in range(3)])) and ran == [0, 1, 2]
