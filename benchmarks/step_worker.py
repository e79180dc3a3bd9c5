"""Run one of the processes of a comparison.

It holds both sides, so that they alternate in the same processes, on the same cores and on the same allocator.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.expert_side import EXPERTS, TorchMixture
from benchmarks.fsdp2_side import SHARDED, TorchSharded, most_allocated
from benchmarks.step_sides import (
    DATA_PARALLEL,
    PIPELINES,
    PLAIN,
    Ours,
    Setup,
    Side,
    TorchData,
    TorchPipeline,
    TorchPlain,
)
from benchmarks.tensor_side import TENSOR, TorchTensor
from piper_runtime.engine import core_share
from piper_runtime.rank import keep_freed_memory

WARM_UP = 3
CHECKED_STEPS = 3
SILENCE_S = 300.0
"""A process that gets no further for this long hangs: no step takes that long, on a busy machine either."""
ALIVE = "alive"
"""A process sends this when it got further."""
SIDES: dict[str, Callable[[Setup, int], Side]] = {
    **dict.fromkeys(PIPELINES, TorchPipeline),
    DATA_PARALLEL: TorchData,
    PLAIN: TorchPlain,
    **dict.fromkeys(SHARDED, TorchSharded),
    **dict.fromkeys(TENSOR, TorchTensor),
    EXPERTS: TorchMixture,
}
"""Torch's side of a rank, by the kind of comparison."""


@dataclass(frozen=True)
class Timing:
    """Hold seconds per step; `cpu_s` has all threads of the process, and nothing that it waited for."""

    wall_s: float
    cpu_s: float


@dataclass
class Measured:
    """Hold what one rank has seen.

    Seconds per step of each timed run, one entry per pair, by the clock and of the process's CPU time. Peaks are the
    most bytes in a step, where torch's side shares states.
    """

    ours: list[Timing] = field(default_factory=list)
    theirs: list[Timing] = field(default_factory=list)
    peak_ours: int = 0
    peak_theirs: int = 0


def work(setup: Setup, rank: int, store: str, pairs: int, pipe: Connection[Any, Any]) -> None:
    """Run as the process's main function: it sends a Measured, or the text of what went wrong."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as our workers do; it is for both sides
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # both sides over loopback
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler of allocations announces itself otherwise

    def alive() -> None:
        pipe.send(ALIVE)
        # Where this process stands is said shortly before the caller gives up.
        faulthandler.dump_traceback_later(0.9 * SILENCE_S)

    try:
        pipe.send(_measure(setup, rank, store, pairs, alive))
    except Exception:  # whatever it is, the other process and the caller must hear of it
        pipe.send(traceback.format_exc())
    # Communicators have no orderly end while the other process may be gone already.
    os._exit(0)


def _measure(setup: Setup, rank: int, path: str, pairs: int, alive: Callable[[], None]) -> Measured:
    alive()
    world = setup.plan.mesh.world
    store = dist.FileStore(path, world)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("torch", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )

    share = partial(core_share, torch.device("cpu"), rank, world)
    with share():  # threads that carry messages, too
        a = Ours(setup, rank, store)
    b = SIDES[setup.kind](setup, rank)

    def cores(side: Side) -> AbstractContextManager[object]:
        """Have a side where its launcher has it: ours on a core of its own, torch's where the system puts it."""
        return nullcontext() if side is b else share()

    for side in (a, b):
        with cores(side):
            for _ in range(WARM_UP):
                side.step()
                alive()
    check_same_training(a, b, setup.tolerance)
    measured = Measured()
    for pair in range(pairs):
        order: list[tuple[Side, list[Timing]]] = [(a, measured.ours), (b, measured.theirs)]
        for side, timings in order if pair % 2 == 0 else reversed(order):
            with cores(side):
                timings.append(_timed(side.step, setup.regime.steps))
            alive()
    if isinstance(b, TorchSharded):
        measured.peak_ours, measured.peak_theirs = (
            side.state_bytes() + most_allocated(side.step) for side in (a, b)
        )
    dist.barrier()
    a.close()
    return measured


def _timed(step: Callable[[], None], steps: int) -> Timing:
    """Time some steps that follow each other; both ranks begin together."""
    gc.collect()
    dist.barrier()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return Timing((time.perf_counter() - begin) / steps, (time.process_time() - begin_cpu) / steps)


def check_same_training(a: Side, b: Side, tolerance: float) -> None:
    """Raise RuntimeError when the two sides do not train the same model on the same data."""
    for step, (x, y) in enumerate(
        zip(a.losses[:CHECKED_STEPS], b.losses[:CHECKED_STEPS], strict=True)
    ):
        if abs(x - y) > tolerance * abs(y):
            raise RuntimeError(
                f"the two sides do not train the same: the loss of step {step} is {x} (ours) and {y} (torch)"
            )
