"""Run instructions beside each other on streams.

One thread issues a rank's program in order, and a backend runs it. On the CPU the compute stream is the issuing thread
itself. It also posts communication that can be posted, which goes on beside compute in the communicator's native
threads until another instruction waits for it. Other work of another stream runs on a thread of that stream, and a wait
is on a counter of finished instructions. An accelerator's backend maps a stream to a device stream and a wait to an
event, with the same interface: `bind` turns each instruction into a closure once per plan, so that issuing it costs a
call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, MutableSequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch

from piper_ir.plan.plan import COMPUTE
from piper_runtime.rank.binding.parts import Thunk

StreamWaits = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Posted:
    """Hold a communication as work: a call returns when it is done.

    Attributes:
        start: begins it and returns a function that blocks until it is done, so that a thread can go on in between.
        watched: whether a thread of the stream waits for the end, to notice it when it comes.
    """

    start: Callable[[], Thunk]
    watched: bool = False

    def __call__(self) -> None:
        self.start()()


HEART_SLOTS = 64
"""The integers of shared memory per rank."""
STEP, ISSUED, PHASE, FIRST_STREAM = 0, 1, 2, 3
"""The slots of a rank's heart: the step, the issued instruction's index, a phase, then one per communication stream.

A stream's slot holds the index of the instruction that it runs or that is waited for, plus one (0: none). Other
processes read them to see progress and to name the instruction of a rank that died.
"""
EVALUATES = HEART_SLOTS - 2
"""The slot that is 1 while a rank evaluates: the other slots then are about the plan of the evaluation."""
LAST_STEP = HEART_SLOTS - 1
"""The slot in which a launcher writes after how many steps an interrupted run ends; 0 without an interrupt."""
MOST_STREAMS = EVALUATES - FIRST_STREAM + 1
"""The most streams that a rank may have, with compute, which has no slot."""
RUNNING, WAITING, LOADING, SAVING = 0, 1, 2, 3
"""The phases of a rank.

They are: in an instruction or between two, waiting for another stream, not yet in the first step, and waiting for a
checkpoint to be written.
"""

Heartbeat = MutableSequence[int]


class StreamAborted(Exception):
    """Report that a wait was given up because another stream has failed; the backend's `error` says why."""


class StreamBackend(Protocol):
    """Provide the streams of one rank."""

    error: BaseException | None
    """The first exception of a stream other than the issuing thread's."""

    def bind(self, index: int, stream: str, waits: StreamWaits, work: Thunk) -> Thunk:
        """Return the closure that issues `work` on `stream` behind `waits` and earlier work of that stream."""

    def begin(self) -> None:
        """Start a step with all streams idle: no instruction is done."""

    def synchronize(self) -> None:
        """Block until everything that was issued is done; raise StreamAborted when a stream has failed."""

    def close(self) -> None:
        """End the streams, which must be idle or have failed."""


class _Progress:
    """Count how many instructions of a stream are done in this step.

    `posted` has the communications that the issuing thread has posted and nobody has waited for yet, oldest first;
    `place` is the stream's slot in the heart. `done` is read without the lock: a waiter announces itself before it
    looks again, and `advance` looks for waiters after it has counted, so with the interpreter's lock one of the two
    always sees the other.
    """

    def __init__(self, place: int) -> None:
        self.place = place
        self.posted: deque[tuple[int, Thunk]] = deque()
        self.done = 0
        self.waiters = 0
        self.changed = threading.Condition()

    def advance(self) -> None:
        self.done += 1
        if self.waiters:
            with self.changed:
                self.changed.notify_all()


class CpuStreams:
    """Run streams on the CPU.

    The issuing thread posts `Posted` work when its waits have ended: a plan that `verify` accepts runs to its end even
    if each rank ends its communications one by one (rule R20). It may be posted before its predecessor on the stream
    has ended. Its end is noticed when it is waited for, or by a thread if it is `watched`. Any other work of a
    communication stream runs on that thread, which the stream gets with the first of it; a step has only one of the
    three kinds.
    """

    def __init__(self, streams: Iterable[str], heart: Heartbeat):
        self.error: BaseException | None = None
        self._heart = heart
        # The first place is not used: compute runs on the issuing thread.
        names = dict.fromkeys([COMPUTE, *streams])
        self._progress = {s: _Progress(place) for place, s in enumerate(names, FIRST_STREAM - 1)}
        self._bound: dict[str, set[int]] = {
            s: set() for s in self._progress
        }  # a program may be bound more than once
        self._queues: dict[
            str, SimpleQueue[tuple[int, tuple[tuple[_Progress, int], ...], Thunk] | None]
        ] = {}
        self._threads: list[threading.Thread] = []

    def bind(self, index: int, stream: str, waits: StreamWaits, work: Thunk) -> Thunk:
        self._bound[stream].add(index)
        needed = tuple((self._progress[s], n) for s, n in waits)
        if stream == COMPUTE:
            advance = self._progress[COMPUTE].advance

            def run() -> None:
                work()
                advance()

            return self._behind(needed, run)
        if isinstance(work, Posted) and work.watched:
            begin, watch = work.start, self._queue(stream).put
            return self._behind(needed, lambda: watch((index, (), begin())))
        if isinstance(work, Posted):
            start, append = work.start, self._progress[stream].posted.append
            return self._behind(needed, lambda: append((index, start())))
        put, task = self._queue(stream).put, (index, needed, work)
        return lambda: put(task)

    def _behind(self, needed: tuple[tuple[_Progress, int], ...], run: Thunk) -> Thunk:
        """Return `run` for the issuing thread, once its needs are done; earlier compute is done by then."""
        needed = tuple(
            (progress, n) for progress, n in needed if progress is not self._progress[COMPUTE]
        )
        if not needed:
            return run
        heart = self._heart

        def wait_and_run() -> None:
            for progress, n in needed:
                if progress.done < n:
                    heart[PHASE] = WAITING
                    self._finish(progress, n)
            heart[PHASE] = RUNNING
            run()

        return wait_and_run

    def _queue(
        self, stream: str
    ) -> SimpleQueue[tuple[int, tuple[tuple[_Progress, int], ...], Thunk] | None]:
        """Return the queue of a stream's thread, which is started with it."""
        if stream not in self._queues:
            self._queues[stream] = SimpleQueue()
            place = self._progress[stream].place
            thread = threading.Thread(
                target=self._serve, args=(stream, place), name=f"piper {stream}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        return self._queues[stream]

    def _finish(self, progress: _Progress, n: int) -> None:
        """Wait for posted communication in its order, or for a thread."""
        heart, posted, place = self._heart, progress.posted, progress.place
        while posted and progress.done < n:
            heart[place] = posted[0][0] + 1
            posted.popleft()[
                1
            ]()  # not kept in a variable: it holds tensors, and the next instruction may free them
            heart[place] = 0
            progress.done += 1
        self._wait(progress, n)

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
                del task, work  # it may hold tensors, and who waits may free them
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
            self._finish(self._progress[stream], len(indices))
        self._heart[PHASE] = RUNNING

    def close(self) -> None:
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()
