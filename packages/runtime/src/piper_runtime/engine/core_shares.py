"""Give each rank of a machine cores of its own, so that its threads never stand behind another rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from piper_ir.tools import usable_cores


@contextmanager
def core_share(device: torch.device, local_rank: int, local_world: int) -> Iterator[bool]:
    """Keep a rank that computes on the CPU on its share of the cores; yield whether each rank has a core of its own.

    This thread stays there until the end, and the threads that it starts for good. A rank's messages go through two
    threads of gloo. Where ranks compute on all cores, the system wakes such a thread on the core where it ran last,
    behind a rank that computes there for milliseconds, while its own rank waits for it and leaves a core idle. On the
    core of its own rank it runs as soon as that one waits (docs/decisions/0032).

    Shares of the `local_world` ranks of a machine are side by side and differ by one core at most. Ranks stay on all
    cores if a share has fewer cores than torch has threads, if the device is not the CPU, or where a process cannot
    choose, or may not.
    """
    count = usable_cores()
    enough = local_world <= count
    if (
        device.type != "cpu"
        or local_world == 1
        or local_world * torch.get_num_threads() > count
        or not hasattr(os, "sched_setaffinity")
    ):
        yield enough
        return
    cores = sorted(os.sched_getaffinity(0))
    first, end = (number * count // local_world for number in (local_rank, local_rank + 1))
    with suppress(OSError):  # some sandboxes refuse it
        os.sched_setaffinity(0, cores[first:end])
    try:
        yield enough
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, cores)
