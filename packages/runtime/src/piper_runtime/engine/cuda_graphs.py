"""Replay the instructions of a rank's step as one CUDA graph. Written from torch's source; not yet run on a device.

Order, streams, events, addresses and sizes of a step are the plan's, so a graph of one step is the graph of all. It
holds the instructions before the first Update, NCCL's messages among them. The host issues the rest, which may depend
on the step: the learning rate, the scale of the loss, a skipped step, any optimizer. Batches, the scale of the loss and
the keys of random numbers are copied from buffers of the host (`StepInputs`), which it writes before the launch, and
numbers for the host into others (`LateNumbers`), which it reads after the step.

The demands of CUDA, NCCL and torch (2.11), and how they are met:

- A capture begins on a stream that is not the default one, and ends there when all others have come back to it. So the
  graph has streams and events of its own: `fork` lets the others begin behind compute, `join` lets compute wait for
  them. These events are used in captures only; CUDA refuses to query a captured event.
- Whether an operation of NCCL is captured must be the same on all members of a communicator. Which steps are launched
  as a graph follows from the options of the run and the step's number, which all ranks share. NCCL has opened its
  connections and kernels are compiled and loaded by then, in the steps before.
- Tensors of the graph are in a memory pool of its own, which is held until the graph is dropped. It is as large as the
  peak of the plan before the update, since torch returns the memory of earlier steps when the capture begins.
- The mode "thread_local" leaves other threads alone: a loader that pins memory, the writer of a checkpoint, NCCL's
  watchdog, which does not know captured messages and does not watch replays.
- A graph holds communicators, and is dropped before they are.

A step that is traced or whose memory is counted is issued by the host: events with times cannot be read in a graph, and
a second pool of memory would be counted. The graph is dropped before it, so that both never need memory at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from piper_ir.plan.plan import COMPUTE
from piper_ir.program.ops import Update
from piper_runtime.engine.cuda_streams import MARK_EVERY, POLL_S, CudaApi, CudaStreams
from piper_runtime.engine.streams import ISSUED, PHASE, RUNNING, Heartbeat
from piper_runtime.rank.binding.parts import Thunk
from piper_runtime.rank.binding.rank import BoundInstr, Rank
from piper_runtime.rank.values.device import LateNumbers

WARM_STEPS = 2
"""The first steps, which the host issues: they compile and load kernels, and open connections."""
WHILE_CAPTURED = (
    "that was while the step was captured as a CUDA graph, in which nothing may wait for the device: leave cuda_graph "
    "out, or what waits"
)
"""The addition to an error in a capture."""


class LaunchedGraph(Protocol):
    """Describe a graph of device work; tests put one in the place of CUDA's."""

    def streams(
        self, program: Sequence[BoundInstr], names: Iterable[str], heart: Heartbeat
    ) -> CudaStreams:
        """Return streams for the work of captures, the first of which captures begin on."""

    def capture(self, body: Thunk) -> None:
        """Call `body`, and keep the work that it issues to these streams in place of running it."""

    def replay(self) -> Callable[[], bool]:
        """Launch the work on the current stream; return a function that says whether it is done."""

    def reset(self) -> None:
        """Drop the work, and the memory that it holds."""


class DeviceGraph:
    """Provide a CUDA graph of torch on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._done = torch.cuda.Event()

    def streams(
        self, program: Sequence[BoundInstr], names: Iterable[str], heart: Heartbeat
    ) -> CudaStreams:
        with torch.cuda.stream(self._stream):
            return CudaStreams(program, names, heart, CudaApi(self._device))

    def capture(self, body: Thunk) -> None:
        graph, home = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        raised: list[Exception] = []
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    body()
                except Exception as error:
                    raised.append(error)
                    raise
        except Exception as error:
            # The end of a failed capture raises another error, which says less than the first.
            raise (raised[0] if raised else error) from None
        finally:
            torch.cuda.set_stream(home)
        self._graph = graph

    def replay(self) -> Callable[[], bool]:
        assert self._graph is not None, "it was captured"
        self._graph.replay()
        self._done.record(torch.cuda.current_stream(self._device))
        return self._done.query

    def reset(self) -> None:
        if self._graph is not None:
            self._graph.reset()
            self._graph = None


class GraphedStep:
    """Launch the instructions of a rank before its update as one graph, which the first launch captures.

    Attributes:
        size: how many instructions of the program that are; an engine issues the rest behind them.
        captures: whether the present step is being captured, or has failed then.
    """

    def __init__(
        self,
        rank: Rank,
        works: Sequence[Thunk],
        heart: Heartbeat,
        graph: LaunchedGraph,
        home: CudaStreams,
    ) -> None:
        """Bind the work of instructions once more; `home` are the streams of instructions that the host issues."""
        self._rank, self._heart, self._graph, self._home = rank, heart, graph, home
        self.size = captured_instructions(rank)
        head = rank.entries[: self.size]
        self._streams = graph.streams(head, dict.fromkeys(e.stream for e in head), heart)
        self._reached = torch.zeros((), dtype=torch.int64, pin_memory=rank.device.type == "cuda")
        shown = _shown(head)
        self._numbers = torch.tensor(shown, dtype=torch.int64).to(rank.device)
        marks = {index: self._mark(works[index], k) for k, index in enumerate(shown)}
        self._issues = [
            self._streams.bind(e.index, e.stream, e.waits, marks.get(e.index, works[e.index]))
            for e in head
        ]
        self.captures, self._warm, self._again = False, 0, self._capture
        self._done: Callable[[], bool] = lambda: True

    def _mark(self, work: Thunk, k: int) -> Thunk:
        """Return the work with a copy to the host behind it, which tells the heart of a replay how far it is."""

        def run() -> None:
            work()
            self._reached.copy_(self._numbers[k], non_blocking=True)

        return run

    def takes(self, *, observed: bool) -> bool:
        """Return whether the present step is launched as a graph; drop the graph if it is observed."""
        self._warm += 1
        if observed:
            self.drop()
        return self._warm > WARM_STEPS and not observed

    def launch(self, step: int) -> None:
        """Begin a step, and launch its captured instructions on compute, with the other streams behind them."""
        rank = self._rank
        rank.prepare(step)
        assert rank.inputs is not None
        with rank.untracked():
            rank.inputs.write()
        self._reached.zero_()
        self._again()
        self._done = self._graph.replay()
        self._home.fork()

    def _capture(self) -> None:
        """Capture the graph, and note the tensors and numbers that its instructions leave."""
        rank, numbers = self._rank, self._rank.numbers
        assert rank.inputs is not None and isinstance(numbers, LateNumbers)
        self.captures = True
        with rank.inputs.captured():
            self._graph.capture(self._issue)
        self.captures = False
        values, counted, read = dict(rank.store.values), dict(rank.counted), numbers.pending

        def again() -> None:
            rank.store.values.update(values)
            rank.counted.update(counted)
            numbers.read_again(read)

        self._again = again

    def _issue(self) -> None:
        self._streams.fork()
        self._rank.allocate_first()
        for index, issue in enumerate(self._issues):
            self._heart[ISSUED] = index
            issue()
        self._streams.join()

    def wait(self) -> None:
        """Wait until the graph is done, and meanwhile show in the heart which instructions of it are."""
        self._heart[PHASE] = RUNNING
        while not self._done():
            self._show()
            time.sleep(POLL_S)

    def _show(self) -> None:
        reached = int(self._reached)
        if self._heart[ISSUED] != reached:
            self._heart[ISSUED] = reached

    def drop(self) -> None:
        """Drop the graph with the tensors that it left, so that the next launch captures another one."""
        self._again = self._capture
        self._graph.reset()


def captured_instructions(rank: Rank) -> int:
    """Return how many instructions of a rank's program are before the first one with an Update."""
    return next(
        index
        for index, instr in enumerate(rank.role.program)
        if any(isinstance(part.op, Update) for part in instr.parts)
    )


def _shown(program: Sequence[BoundInstr]) -> list[int]:
    """Return the instructions of compute whose end a replay shows: every MARK_EVERY-th."""
    compute = [e.index for e in program if e.stream == COMPUTE]
    return compute[MARK_EVERY - 1 :: MARK_EVERY]
