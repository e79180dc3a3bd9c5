"""Show instructions as ranges in profilers, under the names that a plan prints.

torch.profiler shows them as `record_function`, Nsight Systems as NVTX ranges in processes that use CUDA. They are bound
once per run, so that a run without them pays nothing; each costs some microseconds of host time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from piper_runtime.engine.engine import Communicate
from piper_runtime.rank.binding.parts import Thunk
from piper_runtime.rank.binding.rank import BoundComm, BoundInstr, Rank

T = TypeVar("T")


def ranged(name: str, call: Callable[[], T], *, nvtx: bool = False) -> Callable[[], T]:
    """Return a call inside a range; with `nvtx`, also inside one of NVTX."""

    def run() -> T:
        with torch.profiler.record_function(name):
            return call()

    if not nvtx:
        return run

    def run_with_nvtx() -> T:
        torch.cuda.nvtx.range_push(name)
        try:
            return run()
        finally:
            torch.cuda.nvtx.range_pop()

    return run_with_nvtx


@contextmanager
def profiled(folder: Path, rank: int, step: int, program: str) -> Iterator[None]:
    """Write a trace of torch's profiler of one step to `folder`/rank{r}_trace.json.gz, from all threads.

    It has the key of the plan's program as `piper_program`. The step is marked as torch's own schedule marks it, so
    that other readers of such traces find it, too.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it prints when it starts and stops
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    everywhere = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=activities, record_shapes=True, experimental_config=everywhere
    ) as profiler:
        profiler.add_metadata("piper_program", program)
        with torch.profiler.record_function(f"ProfilerStep#{step}"):
            yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"rank{rank}_trace.json.gz"))


def named_instructions(rank: Rank, communicate: Communicate) -> Communicate:
    """Put a range around every instruction of a rank's compute, and return `communicate` with a range around each."""
    nvtx = torch.cuda.is_initialized()
    names = {id(entry.comm): entry.name for entry in rank.entries if entry.comm is not None}
    rank.entries = tuple(_named(entry, nvtx) for entry in rank.entries)

    def bind(comm: BoundComm) -> Thunk:
        return ranged(names[id(comm)], communicate(comm), nvtx=nvtx)

    return bind


def name_inline(rank: Rank) -> None:
    """Put a range around every instruction of a rank that runs inline.

    Its engine copies tensors by itself, so the range of a communication is around taking its tensor.
    """
    nvtx = torch.cuda.is_initialized()

    def operand(entry: BoundInstr) -> BoundInstr:
        if entry.comm is None:
            return entry
        return replace(
            entry,
            comm=replace(entry.comm, operand=ranged(entry.name, entry.comm.operand, nvtx=nvtx)),
        )

    rank.entries = tuple(operand(_named(entry, nvtx)) for entry in rank.entries)


def _named(entry: BoundInstr, nvtx: bool) -> BoundInstr:
    return (
        entry
        if entry.work is None
        else replace(entry, work=ranged(entry.name, entry.work, nvtx=nvtx))
    )
