"""The real engine of one rank: one issue loop in program order over the streams of a backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import torch

from piper_ir.errors import ExecutionError, PiperError
from piper_runtime.memory import MemoryCounter
from piper_runtime.rank import Comm, Rank
from piper_runtime.streams import ISSUED, STEP, Backend, Heart, Start, StreamAborted, Work
from piper_runtime.trace import TimedSpan

Communicate = Callable[[Comm], Start]
"""Binds a communication to a communicator: the closure that starts it."""


class PeerError(ExecutionError):
    """A communication failed; most often because its peer has."""


class Engine:
    """Steps of one rank. With `trace`, steps can be run as `traced`: then `spans` holds the timings of the last one. A traced
    step posts the same communications at the same places; that their ends are clocked costs it a thread per stream (30 us when
    one has to wake another)."""

    def __init__(self, rank: Rank, backend: Backend, communicate: Communicate, heart: Heart, *, trace: bool = False):
        self.spans: list[TimedSpan] = []
        self._ends: dict[str, float] = {}  # stream -> end of its latest span
        self._rank, self._backend, self._heart = rank, backend, heart
        self._starts = {e.index: self._communication(communicate, e.comm, e.index) for e in rank.entries if e.comm is not None}
        self._issues = self._bind(clocked=False)
        # A second binding, with a clock around every instruction, so that steps without it pay nothing.
        self._traced = self._bind(clocked=True) if trace else None

    def _bind(self, *, clocked: bool, counter: MemoryCounter | None = None) -> list[Work]:
        """One closure per instruction. Neither clock nor counter sees an instruction wait."""
        issues = []
        for e in self._rank.entries:
            if e.work is not None:
                work = self._clocked(e.index, e.work) if clocked else e.work
                work = _counted(e.index, work, counter) if counter is not None else work
                issues.append(self._backend.bind(e.index, e.waits, work))
            else:
                start = self._starts[e.index]
                start = self._clocked_start(e.index, e.stream, start) if clocked else start
                issues.append(self._backend.post(e.index, e.stream, e.waits, start, watched=clocked))
        return issues

    def _communication(self, communicate: Communicate, comm: Comm, index: int) -> Start:
        post = communicate(comm)

        def start() -> Work:
            try:
                finish = post()
            except Exception as e:
                raise self._failed(index, e, comm) from e

            def end() -> None:
                try:
                    finish()
                except Exception as e:
                    raise self._failed(index, e, comm) from e

            return end

        return start

    def step(self, step: int, *, traced: bool = False, counter: MemoryCounter | None = None) -> None:
        """Run one optimizer step. ExecutionError names rank, step, instruction and peer; other PiperErrors come as they are."""
        rank, heart = self._rank, self._heart
        issues = self._issues
        if traced:
            assert self._traced is not None, "the engine was made without trace"
            issues = self._traced
            self.spans.clear()
            self._ends.clear()
        if counter is not None:
            issues = self._bind(clocked=traced, counter=counter)
        heart[STEP], index = step, -1
        with torch.no_grad():
            try:
                self._backend.begin()
                with nullcontext() if counter is None else counter.during(-1):
                    rank.begin(step)
                for index, issue in enumerate(issues):
                    heart[ISSUED] = index
                    issue()
                self._backend.synchronize()
                rank.end()
            except StreamAborted:
                assert self._backend.error is not None
                raise self._backend.error from None
            except PiperError:
                raise
            except Exception as e:
                raise self._failed(max(heart[ISSUED], 0), e) from e

    def _clocked(self, index: int, work: Work) -> Work:
        spans, now = self.spans, time.perf_counter

        def run() -> None:
            start = now()
            work()
            spans.append((index, start, now()))

        return run

    def _clocked_start(self, index: int, stream: str, start: Start) -> Start:
        """The span of a communication begins when it is posted and those before it on its stream have ended."""
        spans, ends, now = self.spans, self._ends, time.perf_counter

        def run() -> Work:
            posted, finish = now(), start()

            def end() -> None:
                finish()
                done = now()
                spans.append((index, max(posted, ends.get(stream, posted)), done))
                ends[stream] = done

            return end

        return run

    def _failed(self, index: int, error: Exception, comm: Comm | None = None) -> ExecutionError:
        entry = self._rank.entries[index]
        found = f"value {error} is not there" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        place = f"rank {self._rank.rank}, step {self._rank.step}, instruction {index} ({entry.name} on {entry.stream})"
        if comm is None:
            return ExecutionError(f"{place}: {found}")
        peers = ", ".join(str(p) for p in comm.peers if p != self._rank.rank)
        return PeerError(f"{place}: {comm.kind} with rank {peers} on channel {comm.channel} failed: {found}")


def _counted(index: int, work: Work, counter: MemoryCounter) -> Work:
    def run() -> None:
        with counter.during(index):
            work()

    return run
