"""Streams: where instructions run beside each other. One thread issues a rank's program in order; a backend decides what that
means.

CPU: the compute stream is the issuing thread itself. Communication is posted by it too, and goes on beside compute in the
communicator's own native threads; who needs its result waits for it. An accelerator's backend maps a stream to a device stream
and a wait to an event, with the same interface: `bind` and `post` turn each instruction into a closure once per plan, so that
issuing it costs a call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, MutableSequence
from queue import SimpleQueue
from typing import Protocol

import torch

from piper_ir.plan import COMPUTE

Work = Callable[[], None]
Start = Callable[[], Work]
"""Starts a communication; what it returns blocks until the communication is done."""
Waits = tuple[tuple[str, int], ...]

STEP, ISSUED, PHASE, FIRST_STREAM = 0, 1, 2, 3
"""Places in a rank's heart: the step, the index of the instruction that is issued, a phase, then per communication stream the
index of the instruction that is waited for, plus one (0: none). Others read it to see progress and to name the instruction of a
rank that died."""
RUNNING, WAITING, LOADING = 0, 1, 2
"""Phases: in an instruction or between two, waiting for another stream, not yet in the first step."""

Heart = MutableSequence[int]


class StreamAborted(Exception):
    """A wait was given up because another stream has failed; the backend's `error` says why."""


class Backend(Protocol):
    """The streams of one rank."""

    error: BaseException | None
    """The first exception of a stream other than the issuing thread's."""

    def bind(self, index: int, waits: Waits, work: Work) -> Work:
        """The closure that issues `work` on the compute stream, behind what was issued there before and behind `waits`."""
        ...

    def post(self, index: int, stream: str, waits: Waits, start: Start, *, watched: bool = False) -> Work:
        """The closure that issues a communication on `stream`, behind `waits`. It may begin before those that were issued there
        earlier have ended; they end in order. `watched`: its end is noticed when it comes, not when it is waited for."""
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


class _Stream:
    """A communication stream: `posted` are its communications that nobody has waited for yet, oldest first, and `done` counts
    those that have ended in this step.

    Watched communications go through a thread, which the first of them starts. `done` is read without the lock: a waiter
    announces itself before it looks again, and `advance` looks for waiters after it has counted, so with the interpreter's lock
    one of the two always sees the other."""

    def __init__(self, name: str, place: int) -> None:
        self.name, self.place = name, place
        self.bound: set[int] = set()  # a program may be bound more than once
        self.posted: deque[tuple[int, Work]] = deque()
        self.done = 0
        self.waiters = 0
        self.changed = threading.Condition()
        self.queue: SimpleQueue[tuple[int, Work] | None] = SimpleQueue()
        self.thread: threading.Thread | None = None

    def advance(self) -> None:
        self.done += 1
        if self.waiters:
            with self.changed:
                self.changed.notify_all()


class CpuStreams:
    """Backend for the CPU. A communication that waits for another one is posted when that has ended, by the issuing thread: a
    plan that `verify` accepts runs to its end even if each rank finishes its communications one by one (rule R20)."""

    def __init__(self, streams: Iterable[str], heart: Heart):
        self.error: BaseException | None = None
        self._heart = heart
        others = dict.fromkeys(s for s in streams if s != COMPUTE)
        self._streams = {s: _Stream(s, place) for place, s in enumerate(others, FIRST_STREAM)}

    def bind(self, index: int, waits: Waits, work: Work) -> Work:
        needed = self._needed(waits)
        if not needed:
            return work

        def wait_and_run() -> None:
            for stream, n in needed:
                if stream.done < n:
                    self._wait(stream, n)
            work()

        return wait_and_run

    def post(self, index: int, stream: str, waits: Waits, start: Start, *, watched: bool = False) -> Work:
        on = self._streams[stream]
        on.bound.add(index)
        if watched and on.thread is None:
            on.thread = threading.Thread(target=self._watch, args=(on,), name=f"piper {stream}", daemon=True)
            on.thread.start()
        append = on.queue.put if watched else on.posted.append
        return self.bind(index, waits, lambda: append((index, start())))

    def _needed(self, waits: Waits) -> tuple[tuple[_Stream, int], ...]:
        """Without waits for compute: in one thread, what was issued there is done."""
        return tuple((self._streams[s], n) for s, n in waits if s != COMPUTE)

    def _wait(self, stream: _Stream, n: int) -> None:
        """Block until n communications of a stream have ended."""
        heart, posted, place = self._heart, stream.posted, stream.place
        heart[PHASE] = WAITING
        while posted and stream.done < n:
            heart[place] = posted[0][0] + 1
            posted.popleft()[1]()  # no name for it: it holds tensors, and the next instruction may free them
            heart[place] = 0
            stream.done += 1
        if stream.done < n:
            self._wait_for_watcher(stream, n)
        heart[PHASE] = RUNNING

    def _wait_for_watcher(self, stream: _Stream, n: int) -> None:
        with stream.changed:
            stream.waiters += 1
            try:
                while stream.done < n and self.error is None:
                    stream.changed.wait()
            finally:
                stream.waiters -= 1
        if stream.done < n:
            raise StreamAborted

    def _watch(self, stream: _Stream) -> None:
        torch.set_grad_enabled(False)  # grad mode is per thread
        heart, place = self._heart, stream.place
        try:
            while (task := stream.queue.get()) is not None:
                index, finish = task
                heart[place] = index + 1
                finish()
                del task, finish  # they hold tensors that may be freed from here on
                heart[place] = 0
                stream.advance()
        except BaseException as e:  # handed to the issuing thread, which raises it
            self.error = self.error or e
            for other in self._streams.values():
                with other.changed:
                    other.changed.notify_all()

    def begin(self) -> None:
        for stream in self._streams.values():
            stream.done = 0

    def synchronize(self) -> None:
        for stream in self._streams.values():
            if stream.done < len(stream.bound):
                self._wait(stream, len(stream.bound))

    def close(self) -> None:
        threads = [(s.queue, s.thread) for s in self._streams.values() if s.thread is not None]
        for queue, _ in threads:
            queue.put(None)
        for _, thread in threads:
            thread.join()
