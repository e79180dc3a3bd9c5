"""Streams on the CPU: order, waits, failures. And the engine's host cost, roughly."""

import threading
import time
from types import SimpleNamespace

import pytest

from piper_ir.errors import ExecutionError
from piper_ir.plan import COMPUTE
from piper_runtime.engine import Engine, PeerError
from piper_runtime.rank import Comm, Entry
from piper_runtime.streams import FIRST_STREAM, CpuStreams, StreamAborted, Work


def heart() -> list[int]:
    return [0] * 8


def test_streams_keep_their_order_and_waits_hold() -> None:
    done: list[str] = []
    gate = threading.Event()
    streams = CpuStreams(["a", "b"], heart())

    def note(name: str) -> Work:
        return lambda: done.append(name)

    def gated() -> None:
        gate.wait(10)
        done.append("a0")

    works = [
        streams.bind(0, "a", (), gated),
        streams.bind(1, "a", (), note("a1")),
        streams.bind(2, "b", (("a", 1),), note("b0")),
        streams.bind(3, COMPUTE, (), note("c0")),
        streams.bind(4, COMPUTE, (("a", 2), ("b", 1)), note("c1")),
    ]
    for _ in range(2):
        gate.clear()
        done.clear()
        streams.begin()
        for work in works[:4]:
            work()
        assert done == ["c0"]
        gate.set()
        works[4]()
        streams.synchronize()
        assert (
            done[0] == "c0" and done[-1] == "c1" and done.index("a0") < done.index("a1") and done.index("a0") < done.index("b0")
        )
    streams.close()
    assert not [t for t in threading.enumerate() if t.name in ("piper a", "piper b")]


def test_a_failing_stream_wakes_all_that_wait() -> None:
    def fail() -> None:
        raise ValueError("broken wire")

    beat = heart()
    streams = CpuStreams(["a", "b"], beat)
    issue = [streams.bind(0, "a", (), fail), streams.bind(1, "b", (("a", 1),), lambda: None)]
    last = streams.bind(2, COMPUTE, (("b", 1),), lambda: None)
    streams.begin()
    for work in issue:
        work()
    with pytest.raises(StreamAborted):
        last()
    with pytest.raises(StreamAborted):
        streams.synchronize()
    assert isinstance(streams.error, ValueError) and beat[FIRST_STREAM] == 1  # still in instruction 0
    streams.close()


def engine(entries: list[Entry], streams: CpuStreams, work: Work) -> Engine:
    rank = SimpleNamespace(entries=entries, rank=3, step=0, begin=lambda step: None, end=lambda: None)
    return Engine(rank, streams, lambda comm: work, heart())  # type: ignore[arg-type]  # a rank without tensors


def communication() -> Comm:
    return Comm("recv", "0>1.act", (1, 3), lambda: None)  # type: ignore[arg-type, return-value]  # no tensor is touched


def test_an_error_of_a_communication_names_the_peer() -> None:
    def fail() -> None:
        raise RuntimeError("connection closed")

    streams = CpuStreams(["a"], heart())
    entries = [Entry(0, "a", (), "recv.x", comm=communication()), Entry(1, COMPUTE, (("a", 1),), "f", work=lambda: None)]
    with pytest.raises(PeerError, match=r"rank 3, step 0, instruction 0 \(recv\.x on a\): recv with rank 1 on channel 0>1\.act"):
        engine(entries, streams, fail).step(0)
    streams.close()


def test_an_error_of_compute_names_the_instruction() -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    streams = CpuStreams([], heart())
    entries = [Entry(0, COMPUTE, (), "f", work=lambda: None), Entry(1, COMPUTE, (), "g", work=fail)]
    with pytest.raises(ExecutionError, match=r"instruction 1 \(g on compute\): RuntimeError: no memory"):
        engine(entries, streams, fail).step(0)


def test_issuing_costs_microseconds() -> None:
    """The goal (benchmarks) is 3 us per instruction; a bound of 50 us catches an accidental rebinding or scan, and nothing
    else."""
    count = 4000
    streams = CpuStreams([], heart())
    loop = engine([Entry(i, COMPUTE, (), "n", work=lambda: None) for i in range(count)], streams, lambda: None)
    best = float("inf")
    for step in range(3):
        start = time.perf_counter()
        loop.step(step)
        best = min(best, time.perf_counter() - start)
    assert best / count < 50e-6
