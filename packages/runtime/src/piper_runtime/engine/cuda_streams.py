"""Run a plan's streams on a CUDA device: one device stream for each, and an event if one waits for another.

One thread issues the program in order, far ahead of the device. An instruction makes its device stream wait for the
events of its waits, runs, and records an event if another instruction waits for it or progress is shown there. A wait
names an earlier instruction (R05), so its event has always been recorded in this step when the wait is issued: CUDA
takes a wait for an event that was not recorded as no wait at all. Nothing inside of a step waits for the whole device,
and the host waits for it at the step's end only.

The compute stream is the stream that was current when the streams were made, so work of a rank before the first step
and after the last is in order with it.

Memory. torch's caching allocator hands a freed block to the next allocation on the same stream while the device may
still work on it. It knows nothing of other streams unless it is told by `record_stream`, after which a block comes back
when the device gets there, and memory no longer follows the plan. Here it need not be told. Only the compute stream
allocates and frees (R04), so blocks go from compute to compute. A communication that uses a block comes before the free
in this sense: an instruction that frees a value has waited for every communication that uses it (R16), on the device
too, since the wait was issued on the compute stream before the free. The block's next user is issued later on the
compute stream, behind that wait; and if it is a receive buffer, the receive waits for the compute instruction that
allocated it (R12), whose event was recorded after the block was taken. So no two users of a block ever overlap.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from piper_ir.plan.plan import COMPUTE
from piper_runtime.engine.streams import (
    FIRST_STREAM,
    ISSUED,
    PHASE,
    RUNNING,
    WAITING,
    Heartbeat,
    StreamAborted,
    StreamWaits,
)
from piper_runtime.engine.trace import TimedSpan
from piper_runtime.rank.binding.parts import Thunk
from piper_runtime.rank.binding.rank import BoundInstr

POLL_S = 50e-6
"""The seconds between two looks at the device at the end of a step; a step may end that much too late."""
LOOK_S = 5e-3
"""The seconds between two looks at the device while the host waits for a communication."""
MARK_EVERY = 16
"""The most compute instructions between two events that only show progress."""


class StreamApi(Protocol):
    """Describe the operations of a device that a backend uses.

    Events are torch.cuda.Event's: record(stream), wait(stream), query(), synchronize() and elapsed_time(event) in
    milliseconds.
    """

    def current(self) -> Any:
        """Return the stream that is current in this thread."""

    def stream(self) -> Any:
        """Return a new stream."""

    def event(self, *, timed: bool = False) -> Any:
        """Return a new event."""

    def bound(self, stream: Any, work: Thunk) -> Thunk:
        """Return the closure that runs `work` on the host, with its device operations on `stream`."""


class CudaApi:
    """Provide the operations of torch.cuda on one device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._home = torch.cuda.current_stream(device)

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def event(self, *, timed: bool = False) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=timed)

    def bound(self, stream: torch.cuda.Stream, work: Thunk) -> Thunk:
        home = self._home
        if stream == home:
            return work

        def run() -> None:
            torch.cuda.set_stream(stream)
            try:
                work()
            finally:
                torch.cuda.set_stream(home)

        return run


class CudaStreams:
    """Run streams on a CUDA device whose communications are device work too (NCCL).

    `program` decides which instructions need an event. Events are made once and used in every step.
    """

    def __init__(
        self,
        program: Sequence[BoundInstr],
        streams: Iterable[str],
        heart: Heartbeat,
        api: StreamApi,
    ):
        self.error: BaseException | None = None
        self._heart, self._api = heart, api
        names = dict.fromkeys(s for s in streams if s != COMPUTE)
        self._streams = {COMPUTE: api.current(), **{s: api.stream() for s in names}}
        self._marks = _Marks(program, self._streams, api)
        self._progress = _Progress(
            self._marks, heart, {s: place for place, s in enumerate(names, FIRST_STREAM)}
        )
        self._start, self._zero, self._zero_s = api.event(), api.event(timed=True), 0.0
        self._clocks = False
        self._timed: list[tuple[int, Any, Any, list[TimedSpan]]] = []

    def bind(self, index: int, stream: str, waits: StreamWaits, work: Thunk) -> Thunk:
        here, run, mark = (
            self._streams[stream],
            self._api.bound(self._streams[stream], work),
            self._marks.events.get(index),
        )
        needed = self._marks.needed(stream, waits)
        if not needed and mark is None:
            return run

        def issue() -> None:
            for event in needed:
                event.wait(here)
            run()
            if mark is not None:
                mark.record(here)

        return issue

    def clock(self, index: int, work: Thunk, spans: list[TimedSpan]) -> Thunk:
        """Return `work` timed by the device; its span is in `spans` once the step is synchronized."""
        begin, end, api, timed = (
            self._api.event(timed=True),
            self._api.event(timed=True),
            self._api,
            self._timed,
        )
        self._clocks = True

        def run() -> None:
            here = api.current()
            begin.record(here)
            work()
            end.record(here)
            timed.append((index, begin, end, spans))

        return run

    def begin(self) -> None:
        """Make every stream start behind all work of the step before."""
        self._progress.begin()
        compute = self._streams[COMPUTE]
        self.join()
        self.fork()
        if self._clocks:  # device times count from here, where the device is idle and the host sees the event at once
            self._zero.record(compute)
            self._zero.synchronize()
            self._zero_s = time.perf_counter()

    def fork(self) -> None:
        """Let every other stream wait for the work of compute so far."""
        self._start.record(self._streams[COMPUTE])
        for name, stream in self._streams.items():
            if name != COMPUTE:
                self._start.wait(stream)

    def join(self) -> None:
        """Let compute wait for the last instruction of every other stream, if it was issued."""
        for event in self._marks.last.values():
            event.wait(self._streams[COMPUTE])

    def synchronize(self) -> None:
        """Wait for the device, and meanwhile show its progress in the heart, so that a hang can be named."""
        while not self._progress.look():
            time.sleep(POLL_S)
        self._heart[PHASE] = RUNNING
        for index, begin, end, spans in self._timed:
            spans.append(
                (index, *(self._zero_s + self._zero.elapsed_time(e) / 1e3 for e in (begin, end)))
            )
        self._timed.clear()

    def close(self) -> None:
        """Do nothing: torch keeps its streams in a pool."""


class _Marks:
    """Know which instructions record an event.

    Attributes:
        events: the event of each marked instruction, by index.
        order: the marked indices of each stream, in order.
        last: the event of the last instruction of each stream other than compute.
        last_index: index of the program's last instruction.
        behind: for each marked index, the marked ones on other streams that must be done before it is.
    """

    def __init__(self, program: Sequence[BoundInstr], streams: Iterable[str], api: StreamApi):
        self._on: dict[str, list[int]] = {s: [] for s in streams}
        for entry in program:
            self._on[entry.stream].append(entry.index)
        foreign = {
            e.index: tuple((s, n) for s, n in e.waits if n and s != e.stream) for e in program
        }
        looked_at = {self._on[s][n - 1] for waits in foreign.values() for s, n in waits}
        self.last_index, compute = len(program) - 1, self._on[COMPUTE]
        # Those before a wait too: else a device that is in them looks like one that waits.
        looked_at |= {i for i, following in pairwise(compute) if foreign[following]}
        looked_at |= {*compute[MARK_EVERY - 1 :: MARK_EVERY], *compute[-1:]}
        self.order = {
            s: [i for i in on if s != COMPUTE or i in looked_at] for s, on in self._on.items()
        }
        self.events = {i: api.event() for indices in self.order.values() for i in indices}
        self.last = {
            s: self.events[indices[-1]]
            for s, indices in self._on.items()
            if indices and s != COMPUTE
        }
        self.behind: dict[int, frozenset[int]] = {}
        gathered: dict[str, set[int]] = {s: set() for s in self._on}
        for e in program:
            gathered[e.stream] |= {self._on[s][n - 1] for s, n in foreign[e.index]}
            if e.index in self.events:
                self.behind[e.index] = frozenset(gathered[e.stream])
                gathered[e.stream] = set()

    def needed(self, stream: str, waits: StreamWaits) -> tuple[Any, ...]:
        """Return the events to wait for in place of `waits`; a stream is in order with itself."""
        return tuple(self.events[self._on[s][n - 1]] for s, n in waits if n and s != stream)


class _Progress:
    """Track how far the device is in a step, and show it in the heart."""

    def __init__(self, marks: _Marks, heart: Heartbeat, places: Mapping[str, int]):
        self.places = places
        self._marks, self._heart = marks, heart
        self._left: dict[str, deque[int]] = {}
        self._done: set[int] = set()

    def begin(self) -> None:
        self._left = {s: deque(indices) for s, indices in self._marks.order.items()}
        self._done.clear()

    def look(self) -> bool:
        """Query the device for every stream, show the current instructions, and return whether all is done.

        Everything must have been issued.
        """
        for stream in self._left:
            self.advance(stream)
        for stream, left in self._left.items():
            if stream == COMPUTE:
                self.show_compute()
            else:
                self._heart[self.places[stream]] = left[0] + 1 if self._ready(left) else 0
        return not any(self._left.values())

    def advance(self, stream: str, before: float = inf) -> None:
        """Remove a stream's marked instructions that are done.

        Only instructions below `before` have been issued in this step; the event of another would still tell of the
        step before.
        """
        left = self._left[stream]
        while left and left[0] < before and self._marks.events[left[0]].query():
            self._done.add(left.popleft())

    def show_compute(self, before: float = inf) -> None:
        """Show the compute stream in its first marked instruction that is not done, if all its waits are done.

        Without one below `before` it is shown in `before`. A slot of the heart is written once, because a reader takes
        a change for progress.
        """
        left = self._left[COMPUTE]
        issued = bool(left) and left[0] < before
        self._heart[PHASE] = RUNNING if issued and self._ready(left) else WAITING
        if issued:
            self._heart[ISSUED] = left[0]
        elif before < inf:
            self._heart[ISSUED] = int(before)

    def _ready(self, left: deque[int]) -> bool:
        return bool(left) and self._marks.behind[left[0]] <= self._done


class StagedStreams(CudaStreams):
    """Run streams on a CUDA device whose communications are the host's work (gloo on pinned copies), on a thread each.

    A communication starts when the device has come to its waits, so its thread waits for the events of these. For the
    host it is done when its copy to the device has been issued and its event recorded. An instruction that waits for it
    waits on the host for that, and then lets the device wait for the event.
    """

    def __init__(
        self,
        program: Sequence[BoundInstr],
        streams: Iterable[str],
        heart: Heartbeat,
        api: StreamApi,
    ):
        super().__init__(program, streams, heart, api)
        self._moved = threading.Condition()
        self._done = dict.fromkeys(self._progress.places, 0)
        self._queues: dict[
            str, SimpleQueue[tuple[int, StreamWaits, tuple[Any, ...], Thunk] | None]
        ] = {}
        self._threads: list[threading.Thread] = []
        for stream in self._progress.places:
            self._queues[stream] = SimpleQueue()
            thread = threading.Thread(
                target=self._serve, args=(stream,), name=f"piper {stream}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def bind(self, index: int, stream: str, waits: StreamWaits, work: Thunk) -> Thunk:
        hosted = tuple((s, n) for s, n in waits if n and s not in (COMPUTE, stream))
        if stream == COMPUTE:
            issue = super().bind(index, stream, waits, work)
            return self._after(index, hosted, issue) if hosted else issue
        here, mark, run = (
            self._streams[stream],
            self._marks.events[index],
            self._api.bound(self._streams[stream], work),
        )

        def carry() -> None:
            run()
            mark.record(here)

        put, task = (
            self._queues[stream].put,
            (index, hosted, self._marks.needed(stream, waits), carry),
        )
        return lambda: put(task)

    def _after(self, index: int, waits: StreamWaits, issue: Thunk) -> Thunk:
        heart = self._heart

        def run() -> None:
            self._reach(waits, index)
            heart[ISSUED], heart[PHASE] = index, RUNNING
            issue()

        return run

    def _reach(self, waits: StreamWaits, issuing: int = -1) -> None:
        """Block until so many communications are issued to the device; raise StreamAborted when a stream has failed.

        `issuing` is the compute stream's next instruction; meanwhile the heart shows the device's progress up to it.
        """
        with self._moved:
            while self.error is None and any(self._done[s] < n for s, n in waits):
                if issuing >= 0:
                    self._look(issuing)
                self._moved.wait(LOOK_S)
            if self.error is not None:
                raise StreamAborted

    def _look(self, issuing: int) -> None:
        for stream in self._progress.places:
            done = self._done[stream]
            order = self._marks.order[stream]
            self._progress.advance(stream, order[done] if done < len(order) else inf)
        self._progress.advance(COMPUTE, issuing)
        self._progress.show_compute(issuing)

    def _serve(self, stream: str) -> None:
        torch.set_grad_enabled(False)  # grad mode is per thread
        take, place = self._queues[stream].get, self._progress.places[stream]
        try:
            while (task := take()) is not None:
                index, hosted, events, carry = task
                self._reach(hosted)
                for event in events:
                    event.synchronize()
                self._heart[place] = index + 1
                carry()
                self._heart[place] = 0
                with self._moved:
                    self._done[stream] += 1
                    self._moved.notify_all()
        except StreamAborted:
            return
        except BaseException as e:  # handed to the issuing thread, which raises it
            with self._moved:
                self.error = self.error or e
                self._moved.notify_all()

    def begin(self) -> None:
        self._done = dict.fromkeys(self._progress.places, 0)
        super().begin()

    def synchronize(self) -> None:
        ends = tuple((s, len(self._marks.order[s])) for s in self._progress.places)
        self._reach(ends, self._marks.last_index)
        super().synchronize()

    def close(self) -> None:
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()
