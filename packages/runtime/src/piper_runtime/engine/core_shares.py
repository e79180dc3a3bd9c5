"""Give each rank of a machine cores of its own, so that its threads never stand behind another rank."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any

import torch

from piper_ir.tools import usable_cores


@contextmanager
def core_share(device: torch.device, number: int, sharers: int) -> Iterator[bool]:
    """Keep a rank that computes on the CPU on its share of the cores; yield whether each rank has a core of its own.

    This thread stays there until the end, and the threads that it starts for good. A rank's messages go through two
    threads of gloo. If ranks compute on all cores, the system wakes such a thread on the core that it last ran on,
    behind a rank that computes there for milliseconds, while its own rank waits for it and leaves a core idle. On the
    core of its own rank it runs as soon as that one waits (docs/decisions/0032).

    Shares of the `sharers` ranks on the same cores are side by side and differ by one core at most. Ranks stay on all
    cores if a share has fewer cores than torch has threads, if the device is not the CPU, or if a process cannot
    choose, or may not.
    """
    count = usable_cores()
    enough = sharers <= count
    if (
        device.type != "cpu"
        or sharers == 1
        or sharers * torch.get_num_threads() > count
        or not hasattr(os, "sched_setaffinity")
    ):
        yield enough
        return
    cores = sorted(os.sched_getaffinity(0))
    first, end = (k * count // sharers for k in (number, number + 1))
    with suppress(OSError):  # some sandboxes refuse it
        os.sched_setaffinity(0, cores[first:end])
    try:
        yield enough
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, cores)


def core_sharers(store: Any, rank: int, world: int) -> tuple[int, ...]:
    """Return the ranks that may run on the same cores as this one; all ranks call this, through one store.

    They are the ranks of a machine. If srun or a container has bound each of them to cores of its own, a rank is alone
    on its cores, and they are not divided again.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    store.set(
        f"cores/{rank}", blake2b(f"{platform.node()} {cores}".encode(), digest_size=16).digest()
    )
    keys = store.multi_get([f"cores/{other}" for other in range(world)])
    return tuple(other for other, key in enumerate(keys) if key == keys[rank])
