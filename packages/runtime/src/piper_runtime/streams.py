"""Streams: where instructions run beside each other. One thread issues a rank's program in order; a backend decides what that
means.

CPU: the compute stream is the issuing thread itself, every other stream has a thread, and a wait is on a counter of finished
instructions. An accelerator's backend maps a stream to a device stream and a wait to an event, with the same interface: `bind`
turns each instruction into a closure once per plan, so that issuing it costs a call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, MutableSequence
from queue import SimpleQueue
from typing import Protocol

import torch

from piper_ir.plan import COMPUTE

Work = Callable[[], None]
Waits = tuple[tuple[str, int], ...]

STEP, ISSUED, PHASE, FIRST_STREAM = 0, 1, 2, 3
"""Places in a rank's heart: the step, the index of the instruction that is issued, a phase, then per communication stream the
index of the instruction that it runs, plus one (0: none). Others read it to see progress and to name the instruction of a rank
that died."""
RUNNING, WAITING, LOADING = 0, 1, 2
"""Phases: in an instruction or between two, waiting for another stream, not yet in the first step."""

Heart = MutableSequence[int]


class StreamAborted(Exception):
    """A wait was given up because another stream has failed; the backend's `error` says why."""


class Backend(Protocol):
    """The streams of one rank."""

    error: BaseException | None
    """The first exception of a stream other than the issuing thread's."""

    def bind(self, index: int, stream: str, waits: Waits, work: Work) -> Work:
        """The closure that issues `work` on `stream` behind what was issued there before and behind `waits`."""
        ...

    def begin(self) -> None:
        """Start a step: no instruction of any stream is done. All streams are idle."""
        ...

    def synchronize(self) -> None:
        """Block until everything that was issued is done. StreamAborted when a stream has failed."""
        ...

    def close(self) -> None:
        """End the streams. They must be idle, or have failed."""
        ...


class _Progress:
    """How many instructions of a stream are done in this step. `done` is read without the lock: a waiter announces itself
    before it looks again, and `advance` looks for waiters after it has counted, so with the interpreter's lock one of the two
    always sees the other."""

    def __init__(self) -> None:
        self.done = 0
        self.waiters = 0
        self.changed = threading.Condition()

    def advance(self) -> None:
        self.done += 1
        if self.waiters:
            with self.changed:
                self.changed.notify_all()


class CpuStreams:
    """Backend for the CPU: threads for communication only."""

    def __init__(self, streams: Iterable[str], heart: Heart):
        self.error: BaseException | None = None
        self._heart = heart
        self._progress = {s: _Progress() for s in dict.fromkeys([COMPUTE, *streams])}
        self._bound: dict[str, set[int]] = {s: set() for s in self._progress}  # a program may be bound more than once
        self._queues: dict[str, SimpleQueue[tuple[int, tuple[tuple[_Progress, int], ...], Work] | None]] = {}
        self._threads: list[threading.Thread] = []
        for place, stream in enumerate((s for s in self._progress if s != COMPUTE), FIRST_STREAM):
            self._queues[stream] = SimpleQueue()
            thread = threading.Thread(target=self._serve, args=(stream, place), name=f"piper {stream}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def bind(self, index: int, stream: str, waits: Waits, work: Work) -> Work:
        self._bound[stream].add(index)
        needed = tuple((self._progress[s], n) for s, n in waits)
        if stream == COMPUTE:
            return self._compute(needed, work)
        put, task = self._queues[stream].put, (index, needed, work)
        return lambda: put(task)

    def _compute(self, needed: tuple[tuple[_Progress, int], ...], work: Work) -> Work:
        advance, heart = self._progress[COMPUTE].advance, self._heart

        def run() -> None:
            work()
            advance()

        if not needed:
            return run

        def wait_and_run() -> None:
            for progress, n in needed:
                if progress.done < n:
                    heart[PHASE] = WAITING
                    self._wait(progress, n)
            heart[PHASE] = RUNNING
            work()
            advance()

        return wait_and_run

    def _wait(self, progress: _Progress, n: int) -> None:
        if progress.done >= n:
            return
        with progress.changed:
            progress.waiters += 1
            try:
                while progress.done < n and self.error is None:
                    progress.changed.wait()
            finally:
                progress.waiters -= 1
        if progress.done < n:
            raise StreamAborted

    def _serve(self, stream: str, place: int) -> None:
        torch.set_grad_enabled(False)  # grad mode is per thread
        take, advance, heart = self._queues[stream].get, self._progress[stream].advance, self._heart
        try:
            while (task := take()) is not None:
                index, needed, work = task
                for progress, n in needed:
                    self._wait(progress, n)
                heart[place] = index + 1
                work()
                heart[place] = 0
                advance()
        except StreamAborted:
            return
        except BaseException as e:  # handed to the issuing thread, which raises it
            self.error = self.error or e
            for progress in self._progress.values():
                with progress.changed:
                    progress.changed.notify_all()

    def begin(self) -> None:
        for progress in self._progress.values():
            progress.done = 0

    def synchronize(self) -> None:
        self._heart[PHASE] = WAITING
        for stream, indices in self._bound.items():
            self._wait(self._progress[stream], len(indices))
        self._heart[PHASE] = RUNNING

    def close(self) -> None:
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()
