"""Run one rank with one issue loop in program order over the streams of a backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from piper_ir.ground.errors import ExecutionError, PiperError
from piper_runtime.engine.cuda_graphs import WHILE_CAPTURED, GraphedStep, LaunchedGraph
from piper_runtime.engine.cuda_streams import CudaStreams
from piper_runtime.engine.exchanges import Exchanges
from piper_runtime.engine.failures import cause_of, place_of
from piper_runtime.engine.memory import Counter
from piper_runtime.engine.streams import (
    ISSUED,
    STEP,
    Heartbeat,
    Posted,
    StreamAborted,
    StreamBackend,
)
from piper_runtime.engine.trace import TimedSpan
from piper_runtime.rank.binding.parts import Thunk
from piper_runtime.rank.binding.rank import BoundComm, Rank

Communicate = Callable[[BoundComm], Thunk]
"""A function that binds a communication to a communicator: it returns a closure that runs it to its end."""
T = TypeVar("T")
SpanRecorder = Callable[[int, Thunk, list[TimedSpan]], Thunk]
"""A function that wraps the work of an instruction so that its span is in the list when the step is done."""


class PeerError(ExecutionError):
    """Report that a communication with some ranks failed, mostly because one of them has."""

    def __init__(self, message: str, peers: tuple[int, ...]):
        super().__init__(message)
        self.peers = peers


class Engine:
    """Run the steps of one rank.

    With a `clock`, steps can be run as `traced`: then `spans` holds the timings of the last one, taken by it. On the
    CPU the communication of a traced step is posted as in any other, but threads watch for its end, and cost about
    30 us if one has to wake another.

    With a `graph`, which needs CudaStreams, the instructions before the update are launched as that, from the third
    step on and where the step is not observed.
    """

    def __init__(
        self,
        rank: Rank,
        backend: StreamBackend,
        communicate: Communicate,
        heart: Heartbeat,
        clock: SpanRecorder | None = None,
        graph: LaunchedGraph | None = None,
    ):
        self.spans: list[TimedSpan] = []
        self._rank, self._backend, self._heart = rank, backend, heart
        rank.exchange = exchanges = Exchanges(rank, communicate)
        rank.post = exchanges.post
        self._works = [
            e.work if e.work is not None else self._communication(communicate, e.comm, e.index)
            for e in rank.entries
        ]
        self._issues = self._bind(self._works)
        self._graphed: GraphedStep | None = None
        if graph is not None:
            assert isinstance(backend, CudaStreams), "a graph is launched on a CUDA device"
            self._graphed = GraphedStep(rank, self._works, heart, graph, backend)
        # A second binding, with a clock around every instruction, so that steps without it pay nothing.
        self._traced = (
            None
            if clock is None
            else self._bind([clock(i, w, self.spans) for i, w in enumerate(self._works)])
        )

    def _bind(self, works: list[Thunk]) -> list[Thunk]:
        return [
            self._backend.bind(e.index, e.stream, e.waits, w)
            for e, w in zip(self._rank.entries, works, strict=True)
        ]

    def _communication(self, communicate: Communicate, comm: BoundComm | None, index: int) -> Thunk:
        assert comm is not None
        work = communicate(comm)

        def named(run: Callable[[], T]) -> Callable[[], T]:
            def call() -> T:
                try:
                    return run()
                except Exception as e:
                    raise self._failed(index, e, comm) from e

            return call

        return (
            Posted(named(lambda: named(work.start()))) if isinstance(work, Posted) else named(work)
        )

    def step(self, step: int, *, traced: bool = False, counter: Counter | None = None) -> None:
        """Run one optimizer step.

        Raises ExecutionError, which names rank, step, instruction and peer; other PiperErrors pass unchanged.
        """
        rank, heart = self._rank, self._heart
        issues = self._issues
        if traced:
            assert self._traced is not None, "the engine was made without a clock"
            issues = self._traced
            self.spans.clear()
        heart[STEP], index = step, -1
        with torch.no_grad():
            try:
                self._backend.begin()
                first, graphed = 0, self._graphed
                if graphed is not None and graphed.takes(observed=traced or counter is not None):
                    graphed.launch(step)
                    first = graphed.size
                elif counter is None:
                    rank.begin(step)
                if counter is not None:
                    self._counted(step, issues, counter)
                else:
                    for index, issue in enumerate(issues[first:], first):
                        heart[ISSUED] = index
                        issue()
                if graphed is not None:
                    graphed.wait()
                self._backend.synchronize()
                rank.end()
            except StreamAborted:
                assert self._backend.error is not None
                raise self._backend.error from None
            except PiperError:
                raise
            except Exception as e:
                raise self._failed(max(heart[ISSUED], 0), e) from e

    def close(self) -> None:
        """Drop the graph, which holds memory and communicators."""
        if self._graphed is not None:
            self._graphed.drop()

    def _counted(self, step: int, issues: list[Thunk], counter: Counter) -> None:
        with counter.during(-1):
            self._rank.begin(step)
        for entry, issue in zip(self._rank.entries, issues, strict=True):
            self._heart[ISSUED] = entry.index
            if entry.work is None:
                issue()
                continue
            with counter.during(entry.index):
                issue()

    def _failed(
        self, index: int, error: Exception, comm: BoundComm | None = None
    ) -> ExecutionError:
        entry = self._rank.entries[index]
        cause, place = cause_of(self._rank, entry, error), place_of(self._rank, entry)
        if self._graphed is not None and self._graphed.captures:
            cause += f"; {WHILE_CAPTURED}"
        if comm is None:
            return ExecutionError(f"{place}: {cause}")
        peers = tuple(p for p in comm.peers if p != self._rank.rank)
        named = ", ".join(map(str, peers))
        return PeerError(
            f"{place}: {comm.kind} with rank {named} on channel {comm.channel} failed: {cause}",
            peers,
        )


def host_clock(index: int, work: Thunk, spans: list[TimedSpan]) -> Thunk:
    """Return the work of an instruction, timed by the host's clock; this is a SpanRecorder."""
    now = time.perf_counter
    if isinstance(work, Posted):
        return _clocked_post(index, work, spans)

    def run() -> None:
        start = now()
        work()
        spans.append((index, start, now()))

    return run


def _clocked_post(index: int, work: Posted, spans: list[TimedSpan]) -> Posted:
    """Return a communication whose span begins when it is posted and lasts to its end.

    With gloo only a waiting thread learns when a transfer ends: a send or a receive has no callback and cannot be
    polled.
    """
    now = time.perf_counter

    def post() -> Thunk:
        start = now()
        finish = work.start()

        def watch() -> None:
            finish()
            spans.append((index, start, now()))

        return watch

    return Posted(post, watched=True)
