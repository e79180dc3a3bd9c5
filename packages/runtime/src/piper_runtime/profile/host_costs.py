"""Measure the issuing thread's time for instructions, beside their work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch

from piper_ir.plan.plan import Plan
from piper_runtime.engine.cuda_streams import CudaApi, CudaStreams
from piper_runtime.engine.engine import Engine
from piper_runtime.engine.streams import CpuStreams, Heartbeat, Posted
from piper_runtime.profile.device_clocks import Clock
from piper_runtime.profile.measured_plans import instructions_plan, messages_plan
from piper_runtime.rank.binding.parts import Thunk
from piper_runtime.rank.binding.rank import BoundComm, Rank
from piper_runtime.rank.binding.rank_state import RankJob
from piper_runtime.rank.job.job import NamedParameters

INSTRUCTIONS = 512
"""The number of instructions in a plan that does nothing else."""


def host_seconds(heart: Heartbeat, turns: Iterable[object]) -> Iterator[tuple[float, float]]:
    """Yield, at each turn, the seconds per instruction without work, and per message that is posted nowhere.

    The latter is beyond the scalar that the message carries. Only the time of this thread counts, which neither waits
    for another nor for its turn on a shared processor.
    """
    nothing, scalars = (_idle_rank(instructions_plan(INSTRUCTIONS)) for _ in range(2))
    nothing.entries = tuple(replace(e, work=_do_nothing) for e in nothing.entries)
    ranks = (nothing, scalars, _idle_rank(messages_plan(INSTRUCTIONS)))
    with ExitStack() as stack:
        issue, make, send = (stack.enter_context(_stepping(rank, heart)) for rank in ranks)
        for _ in turns:
            bare, issued = _thread_seconds(_do_nothing_often), _thread_seconds(issue)
            made, sent = _thread_seconds(make), _thread_seconds(send)
            yield (issued - bare) / INSTRUCTIONS, (sent - made) / INSTRUCTIONS


def issue_seconds(
    device: torch.device, heart: Heartbeat, clock: Clock, turns: Iterable[object]
) -> Iterator[float]:
    """Yield, at each turn, the seconds by the clock per instruction on a CUDA device, beyond its work there.

    They are the host's, which issues slower than the device makes scalars.
    """
    bound = _idle_rank(instructions_plan(INSTRUCTIONS), device)
    works = [e.work for e in bound.entries if e.work is not None]
    backend = CudaStreams(bound.entries, bound.role.streams, heart, CudaApi(device))
    engine = Engine(bound, backend, _posted_nowhere, heart)
    try:
        for step, _ in enumerate(turns):
            begin = time.perf_counter()
            engine.step(step)
            wall = time.perf_counter() - begin
            yield (wall - clock.all(lambda: [work() for work in works])) / INSTRUCTIONS
    finally:
        backend.close()


@contextmanager
def _stepping(bound: Rank, heart: Heartbeat) -> Iterator[Thunk]:
    """Yield a closure that runs a step of a rank without its messages."""
    backend = CpuStreams(bound.role.streams, heart)
    engine = Engine(bound, backend, _posted_nowhere, heart)
    try:
        yield partial(engine.step, 0)
    finally:
        backend.close()


def _thread_seconds(run: Callable[[], object]) -> float:
    """Return the processor seconds of the calling thread alone."""
    begin = time.thread_time()
    run()
    return time.thread_time() - begin


def _do_nothing() -> None:
    """Replace the work of an instruction that has none."""


def _do_nothing_often() -> None:
    for _ in range(INSTRUCTIONS):
        _do_nothing()


def _posted_nowhere(comm: BoundComm) -> Thunk:
    """Return a communication that takes its operand and has ended when it is posted."""
    operand = comm.operand
    return Posted(lambda: partial(_drop, operand()))


def _drop(_: object) -> None:
    """Accept a message that was never sent."""


def _idle_rank(plan: Plan, device: torch.device | None = None) -> Rank:
    return Rank(
        plan, 0, {}, RankJob(_no_batch, _sgd, None, 0), {}, {}, None, device or torch.device("cpu")
    )


def _no_batch(step: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError("plans of the profiler load nothing")


def _sgd(named: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.0)
