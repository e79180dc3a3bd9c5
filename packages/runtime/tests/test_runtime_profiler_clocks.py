"""How closures and messages are timed, on a made-up CUDA device whose time passes by what it is given."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from piper_ir.ground.trace import BUSY_MACHINE
from piper_runtime.engine.core_waits import core_waits, core_waits_of_all
from piper_runtime.launch.ground.report import RankReport
from piper_runtime.launch.running.attempts import busy_note
from piper_runtime.profile import device_clocks
from piper_runtime.profile.device_clocks import CYCLES_PER_S, DeviceClock, HostClock, clock_of
from piper_runtime.profile.measure_messages import BLOCK_BYTES, ISSUE_S, Messages, block_length
from piper_runtime.rank.values.device import CPU
from piper_runtime.transport.gloo import GlooCommunicators
from tests.helpers.cases import each_case


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
    assert all(s >= 0 for s in clock.each([partial(ran.append, k) for k in range(3)])) and ran == [
        0,
        1,
        2,
    ]


def test_a_device_sleeps_at_least_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cycles: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append)
    DeviceClock(torch.device("cuda", 0)).sleep(0.01)
    HostClock().sleep(0.01)
    assert cycles == [22_000_000], "10 ms at 2.2 GHz; no device today is faster"


def whole(nbytes: int, blocks: int) -> int:
    """The bytes of float32 numbers in so many equal blocks."""
    return 4 * blocks * -(-nbytes // (4 * blocks))


@each_case("world", [1, 2, 3])
def test_messages_between_all_ranks_are_measured(world: int) -> None:
    """Without a partner for the last rank too, which meets the others all the same. Here between threads."""
    store, found, sizes = dist.HashStore(), {}, [4, 1 << 20, 1 << 21]

    def rank(r: int) -> None:
        messages = Messages(
            r, world, GlooCommunicators(store, r), HostClock(), torch.device("cpu"), lambda: None
        )
        found[r] = messages.measure(sizes, 2)

    threads = [threading.Thread(target=rank, args=(r,), daemon=True) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    pair = {0: (0, 1), 1: (0, 1)}
    for r in range(world):
        kinds = [
            *(["p2p"] if world > 1 and r in pair else []),
            *(["all_reduce", "shift"] if world > 1 else []),
        ]
        ring, pairs = (["all_gather", "reduce_scatter"], ["all_to_all"]) if world > 1 else ([], [])
        blocks = [
            (k, whole(n, world))
            for n, some in ((1 << 20, ring + pairs), (1 << 21, ring))
            for k in some
        ]
        assert [(s.op, s.bytes) for s in found[r] if s.op not in ring + pairs] == [
            (k, n) for n in sizes for k in kinds
        ]
        assert [(s.op, s.bytes) for s in found[r] if s.op in ring + pairs] == blocks, (
            "not those of 4 bytes, nor large ones of pairs"
        )
        assert all(len(s.seconds) == len(s.busy) == 2 and min(s.seconds) > 0 for s in found[r])
        assert all(
            s.members == (pair[r] if s.op == "p2p" else tuple(range(world))) for s in found[r]
        )


def test_on_a_device_the_ranks_have_met_and_the_host_is_ahead_when_messages_are_timed(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of 0.5 s, which are all the same; the first also waits for the other rank, 10 s."""
    waited: list[float] = []

    def message() -> None:
        device.work(0.5 if waited else 10.5)
        waited.append(1.0)

    asleep: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", asleep.append)
    messages = Messages(
        0,
        1,
        GlooCommunicators(dist.HashStore(), 0),
        clock_of(torch.device("cuda", 0)),
        CPU,
        lambda: None,
    )
    (sample,) = messages._blocks("p2p", (0, 1), torch.zeros(1 << 20), [message], 3)
    assert sample.seconds == (0.5, 0.5, 0.5) and sample.busy == (0.0, 0.0, 0.0)
    turns = 4 * (1 + 64)  # 256 MiB of 4 MiB
    assert len(waited) == turns and asleep == [round(65 * ISSUE_S * CYCLES_PER_S)] * 4


def test_few_repeats_time_shorter_blocks_and_large_messages_as_ever() -> None:
    assert [block_length("p2p", 4, n, BLOCK_BYTES) for n in (1, 2, 4, 7)] == [25, 50, 100, 100]
    assert [block_length("all_gather", 1024, n, BLOCK_BYTES) for n in (1, 4)] == [10, 40]
    assert [block_length("all_reduce", 1 << 22, n, BLOCK_BYTES) for n in (1, 7)] == [3, 3]


def test_with_a_core_of_its_own_waits_for_it_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = waited = 0.0
    monkeypatch.setattr(device_clocks, "core_waits", lambda: lambda: waited)
    monkeypatch.setattr(device_clocks, "time", SimpleNamespace(perf_counter=lambda: now))

    def run(computes: float, waits: float) -> None:
        nonlocal now, waited
        now, waited = now + computes + waits, waited + waits

    alone, shared = clock_of(CPU, own_core=True), clock_of(CPU)
    runs = [partial(run, 2.0, 0.0), partial(run, 1.0, 5.0)]
    assert (alone.each(runs), shared.each(runs)) == ([2.0, 1.0], [2.0, 6.0])
    assert alone.all(partial(run, -1e-9, 1.0)) == 0.0, (
        "waits are counted by another clock than the host's"
    )


@pytest.fixture
def crowded_core() -> Iterator[None]:
    """Put this thread on a core on which another process computes all the time."""
    cores = os.sched_getaffinity(0)
    core = min(cores)
    text = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    other = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
    assert other.stdout is not None
    with other, other.stdout:
        other.stdout.readline()
        os.sched_setaffinity(0, {core})
        try:
            yield
        finally:
            os.sched_setaffinity(0, cores)
            other.kill()


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(),
    reason="the system does not count waits for a core",
)
def test_waits_for_a_core_are_what_a_thread_did_not_compute(crowded_core: None) -> None:
    waits = core_waits()
    begin, computed, before, before_of_all = (
        time.perf_counter(),
        time.thread_time(),
        waits(),
        core_waits_of_all(),
    )
    while time.thread_time() - computed < 0.2:
        pass
    after_of_all, after, computed, took = (
        core_waits_of_all(),
        waits(),
        time.thread_time() - computed,
        time.perf_counter() - begin,
    )
    assert after - before > 0.03, "the other process had its turns"
    assert took - (after - before) == pytest.approx(computed, abs=0.02)
    assert after_of_all - before_of_all > 0.03


def test_a_run_says_when_its_ranks_waited_for_cores() -> None:
    """Steps of the warm-up do not count, and little is not worth a word."""
    reports = {
        rank: RankReport(core_s=[9.0, 9.0, 9.0, s, s, 10 * s], threads_s=4 * s)
        for rank, s in enumerate((0.02, 0.03))
    }
    (said,) = busy_note(reports, 0.2).values()
    assert "ranks waited 20 ms to 30 ms for a core" in said and "up to 120 ms" in said
    carried = {0: RankReport(core_s=[0.0] * 9, threads_s=0.11)}
    assert "110 ms" in busy_note(carried, 0.2)[BUSY_MACHINE] and busy_note(carried, 0.3) == {}, (
        "threads of messages count, too"
    )
    assert (
        busy_note(reports, 0.4)
        == busy_note(reports, None)
        == busy_note({0: RankReport()}, 0.2)
        == {}
    )
