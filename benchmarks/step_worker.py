"""One of the two processes of a comparison: it holds both sides, so that they alternate in the same processes, on the same cores
and on the same allocator."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.step_profile import Profile, profiled
from benchmarks.step_sides import WORLD, Ours, Setup, Side, theirs

WARM_UP = 3
CHECKED_STEPS = 3
PROFILED_STEPS = 3
TOLERANCE = 1e-4
"""Relative, of the losses of the first steps: sums in another order differ by far less, another model or batch by more."""


@dataclass
class Measured:
    """What one rank has seen. Seconds per step of each timed run, one entry per pair; `forward_s`: of each forward of ours."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    profile_ours: Profile = field(default_factory=dict)
    profile_theirs: Profile = field(default_factory=dict)


def work(setup: Setup, rank: int, store: str, pairs: int, pipe: Connection[Any, Any]) -> None:
    """The process's main function: sends a Measured, or the text of what went wrong."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # both sides over loopback
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler announces itself otherwise
    try:
        pipe.send(_measure(setup, rank, store, pairs))
    except Exception:  # whatever it is, the other process and the caller must hear of it
        pipe.send(traceback.format_exc())
    # Communicators have no orderly end while the other process may be gone already.
    os._exit(0)


def _measure(setup: Setup, rank: int, path: str, pairs: int) -> Measured:
    store = dist.FileStore(path, WORLD)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("torch", store), rank=rank, world_size=WORLD, timeout=timedelta(seconds=120)
    )
    a, b = Ours(setup, rank, store), theirs(setup, rank)
    for side in (a, b):
        for _ in range(WARM_UP):
            side.step()
    check_same_training(a, b)
    out = Measured()
    for pair in range(pairs):
        order: list[tuple[Side, list[float]]] = [(a, out.ours), (b, out.theirs)]
        for side, seconds in order if pair % 2 == 0 else reversed(order):
            seconds.append(_timed(side.step, setup.regime.steps))
    steps = max(setup.regime.steps, PROFILED_STEPS)
    out.forward_s = a.forward_s()
    dist.barrier()
    out.profile_ours = profiled(a.step, steps)
    dist.barrier()
    out.profile_theirs = profiled(b.step, steps)
    dist.barrier()
    a.close()
    return out


def _timed(step: Callable[[], None], steps: int) -> float:
    """Seconds per step of some steps that follow each other. Both ranks begin together."""
    gc.collect()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - begin) / steps


def check_same_training(a: Side, b: Side) -> None:
    """RuntimeError when the two sides do not train the same model on the same data."""
    for step, (x, y) in enumerate(zip(a.losses[:CHECKED_STEPS], b.losses[:CHECKED_STEPS], strict=True)):
        if abs(x - y) > TOLERANCE * abs(y):
            raise RuntimeError(f"the two sides do not train the same: the loss of step {step} is {x} (ours) and {y} (torch)")
