"""Streams on the CPU: order, waits, failures. And the engine's host cost, roughly."""

import threading
import time
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from piper_ir.ground.errors import ExecutionError
from piper_ir.plan.plan import COMPUTE, Instr, Part
from piper_ir.program.ops import Collective, Recv, Send
from piper_runtime.engine.engine import Engine, PeerError, host_clock
from piper_runtime.engine.streams import (
    FIRST_STREAM,
    PHASE,
    WAITING,
    CpuStreams,
    Posted,
    StreamAborted,
)
from piper_runtime.rank.binding.parts import Thunk
from piper_runtime.rank.binding.rank import BoundComm, BoundInstr, own_waits
from piper_runtime.transport.gloo import void


def heart() -> list[int]:
    return [0] * 8


def work_of(kind: str, run: Thunk) -> Thunk:
    """As a thread runs it, or as it is posted and waited for by whom."""
    return run if kind == "on a thread" else Posted(lambda: run, watched=kind == "watched")


KINDS = pytest.mark.parametrize("kind", ["posted", "watched", "on a thread"])


@KINDS
def test_streams_keep_their_order_and_waits_hold(kind: str) -> None:
    done: list[str] = []
    gate = threading.Event()
    streams = CpuStreams(["a", "b"], heart())

    def note(name: str) -> Thunk:
        return lambda: done.append(name)

    def gated() -> None:
        gate.wait(10)
        done.append("a0")

    works = [
        streams.bind(0, "a", (), work_of(kind, gated)),
        streams.bind(1, "a", (), work_of(kind, note("a1"))),
        streams.bind(2, COMPUTE, (), note("c0")),
        streams.bind(3, "b", (("a", 1), (COMPUTE, 1)), work_of(kind, note("b0"))),
        streams.bind(4, COMPUTE, (("a", 2), ("b", 1)), note("c1")),
    ]
    for _ in range(2):
        gate.clear()
        done.clear()
        streams.begin()
        for work in works[:3]:
            work()
        assert done == ["c0"]
        gate.set()
        for work in works[3:]:
            work()
        streams.synchronize()
        assert done[:2] == ["c0", "a0"] and done[-1] == "c1" and sorted(done[2:4]) == ["a1", "b0"]
    streams.close()
    assert not [t for t in threading.enumerate() if t.name in ("piper a", "piper b")]


def test_communication_is_posted_at_once_ends_when_it_is_waited_for_and_needs_no_thread() -> None:
    posted: list[int] = []
    ended: list[int] = []

    def communication(k: int) -> Posted:
        def start() -> Thunk:
            posted.append(k)
            return lambda: ended.append(k)

        return Posted(start)

    streams = CpuStreams(["a"], heart())
    issue = [streams.bind(k, "a", (), communication(k)) for k in range(3)]
    wait = streams.bind(3, COMPUTE, (("a", 2),), lambda: None)
    streams.begin()
    for work in issue:
        work()
    assert posted == [0, 1, 2] and ended == []
    wait()
    assert ended == [0, 1]
    streams.synchronize()
    assert ended == [0, 1, 2] and not [t for t in threading.enumerate() if t.name == "piper a"]


def test_a_traced_step_posts_as_any_other_and_sees_the_end_when_it_comes() -> None:
    """The first communication ends while compute goes on, before anybody waits for it."""
    posted: list[int] = []
    over = [threading.Event(), threading.Event()]
    noticed = threading.Event()

    def communication(k: int) -> Posted:
        def start() -> Thunk:
            posted.append(k)
            return lambda: void(over[k].wait(10))

        return Posted(start)

    def compute() -> None:
        assert posted == [0, 1]
        over[0].set()
        while not traced.spans:
            noticed.wait(0.001)
        assert [index for index, _, _ in traced.spans] == [0]
        over[1].set()

    works = iter([communication(0), communication(1)])
    entries = [
        BoundInstr(k, "a", (), f"recv{k}", comm=communication_with_a_peer()) for k in range(2)
    ]
    entries.append(BoundInstr(2, COMPUTE, (), "compute", work=compute))
    streams = CpuStreams(["a"], heart())
    rank = SimpleNamespace(
        entries=entries, rank=3, step=0, begin=lambda step: None, end=lambda: None
    )
    traced = Engine(rank, streams, lambda comm: next(works), heart(), host_clock)  # type: ignore[arg-type]  # a rank without tensors
    traced.step(0, traced=True)
    streams.close()
    assert sorted(index for index, _, _ in traced.spans) == [0, 1, 2]


@KINDS
def test_what_a_communication_held_is_dropped_before_the_next_instruction(kind: str) -> None:
    """The plan may free a tensor in the instruction that waited for its send."""
    sent = [torch.zeros(1)]
    alive = weakref.ref(sent[0])
    send = Posted(lambda: partial(void, sent.pop()), watched=kind == "watched")
    streams = CpuStreams(["a"], heart())
    found: list[torch.Tensor | None] = []
    issue = streams.bind(0, "a", (), (lambda: send()) if kind == "on a thread" else send)
    look = streams.bind(1, COMPUTE, (("a", 1),), lambda: found.append(alive()))
    streams.begin()
    issue()
    look()
    streams.synchronize()
    streams.close()
    assert found == [None]


@KINDS
def test_a_failing_stream_wakes_all_that_wait(kind: str) -> None:
    def fail() -> None:
        raise ValueError("broken wire")

    beat = heart()
    streams = CpuStreams(["a", "b"], beat)
    issue = streams.bind(0, "a", (), work_of(kind, fail))
    behind = streams.bind(1, "b", (("a", 1),), work_of(kind, lambda: None))
    last = streams.bind(2, COMPUTE, (("b", 1),), lambda: None)
    streams.begin()
    issue()
    if kind == "posted":
        with pytest.raises(ValueError, match="broken wire"):
            behind()
        assert beat[PHASE] == WAITING
    else:
        with nullcontext() if kind == "on a thread" else pytest.raises(StreamAborted):
            behind()
        with pytest.raises(StreamAborted):
            last()
        with pytest.raises(StreamAborted):
            streams.synchronize()
        assert isinstance(streams.error, ValueError)
    assert beat[FIRST_STREAM] == 1  # still in instruction 0
    streams.close()


def engine(
    entries: list[BoundInstr], streams: CpuStreams, work: Thunk, *, trace: bool = False
) -> Engine:
    rank = SimpleNamespace(
        entries=entries, rank=3, step=0, begin=lambda step: None, end=lambda: None
    )
    return Engine(rank, streams, lambda comm: work, heart(), host_clock if trace else None)  # type: ignore[arg-type]  # a rank without tensors


def communication_with_a_peer() -> BoundComm:
    return BoundComm("recv", "0>1.act", (1, 3), lambda: None)  # type: ignore[arg-type, return-value]  # no tensor is touched


@pytest.mark.parametrize("traced", [False, True])
def test_an_error_of_a_communication_names_the_peer(traced: bool) -> None:
    def fail() -> None:
        raise RuntimeError("connection closed")

    streams = CpuStreams(["a"], heart())
    entries = [
        BoundInstr(0, "a", (), "recv.x", comm=communication_with_a_peer()),
        BoundInstr(1, COMPUTE, (("a", 1),), "f", work=lambda: None),
    ]
    with pytest.raises(
        PeerError,
        match=r"rank 3, step 0, instruction 0 \(recv\.x on a\): recv with rank 1 on channel "
        r"0>1\.act",
    ):
        engine(entries, streams, Posted(lambda: fail), trace=True).step(0, traced=traced)
    streams.close()


def test_an_error_of_compute_names_the_instruction() -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    streams = CpuStreams([], heart())
    entries = [
        BoundInstr(0, COMPUTE, (), "f", work=lambda: None),
        BoundInstr(1, COMPUTE, (), "g", work=fail),
    ]
    with pytest.raises(
        ExecutionError, match=r"instruction 1 \(g on compute\): RuntimeError: no memory"
    ):
        engine(entries, streams, fail).step(0)


def test_issuing_costs_microseconds() -> None:
    """The goal (benchmarks) is 3 us per instruction; a bound of 50 us catches an accidental rebinding or scan, and
    nothing else."""
    count = 4000
    streams = CpuStreams([], heart())
    loop = engine(
        [BoundInstr(i, COMPUTE, (), "n", work=lambda: None) for i in range(count)],
        streams,
        lambda: None,
    )
    best = float("inf")
    for step in range(3):
        start = time.perf_counter()
        loop.step(step)
        best = min(best, time.perf_counter() - start)
    assert best / count < 50e-6


def test_a_communication_waits_for_one_on_its_own_stream_only_when_it_takes_its_result() -> None:
    def comm(
        op: Send | Recv | Collective,
        reads: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
        stream: str = "s",
    ) -> Instr:
        return Instr(stream, (Part("n", op, 0, reads, writes),))

    program = [
        comm(Recv("c"), writes=("x",)),
        comm(Send("d"), reads=("y",)),
        comm(Send("d"), reads=("x",)),
        comm(Collective("all_reduce", "r"), reads=("x",), writes=("z",)),
        comm(Send("e"), reads=("x",), stream="other"),  # the plan has a wait of its own for that
        comm(Collective("all_reduce", "r", "bucket0")),
        comm(Collective("all_reduce", "r", "bucket1")),
        comm(Collective("all_reduce", "r", "bucket0")),
    ]
    assert own_waits(program) == {2: (("s", 1),), 3: (("s", 1),), 7: (("s", 5),)}


def test_what_a_collective_leaves_undefined_is_sent_first() -> None:
    """A send posted before it on the same stream may still be under way."""

    def comm(op: Send | Collective, reads: tuple[str, ...], writes: tuple[str, ...] = ()) -> Instr:
        return Instr("s", (Part(f"{op}", op, 0, reads, writes),))

    program = [
        comm(Send("c"), ("v",)),
        comm(Collective("all_gather", "g"), ("v",), ("w",)),
        comm(Collective("reduce_scatter", "g"), ("v",), ("p",)),
    ]
    assert own_waits(program) == {2: (("s", 2),)}, (
        "the gather reads, and the reduction overwrites, what was read last"
    )
