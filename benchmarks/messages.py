"""Measure how long messages over gloo stand still, with and without what the runtime does about it.

Two processes on two cores meet in an all-to-all, as the devices of a mixture do: each computes until a moment that both
know, so that what is measured is the message and not which one comes late. A message that takes more than `STALL_S` has
stood still: it takes a tenth of that when nothing is in its way. Threads get another policy and other cores between the
turns, so all four ways have the same processes, connections and neighbours, in turns.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import Row
from piper_ir.tools import usable_cores
from piper_runtime.transport import GlooCommunicators

WORLD, NBYTES = 2, 640 << 10
STALL_S, APART_S, COMPUTE_S = 2.5e-3, 6e-3, 4e-3
TURNS, QUICK_TURNS, MESSAGES = 20, 3, 50
WAYS = {
    "as torch starts gloo": (False, False),
    "threads of sockets displace no other": (True, False),
    "each rank on a core of its own": (False, True),
    "both, as the runtime does": (True, True),
}
"""Whether threads that read sockets leave others their core, and whether each rank keeps to one core."""


def rows(quick: bool) -> Iterator[Row]:
    """Return per way the seconds of a message and the share of messages that stood still; nothing on a single core."""
    if usable_cores() < WORLD:
        return
    for way, seconds in measured(QUICK_TURNS if quick else TURNS).items():
        note = (
            f"{len(seconds)} messages of {NBYTES >> 10} KiB behind {COMPUTE_S * 1e3:g} ms of "
            f"compute; median, and mean as high"
        )
        yield Row(
            "messages",
            f"{way}: all-to-all",
            median(seconds) * 1e3,
            "ms",
            high=fmean(seconds) * 1e3,
            note=note,
        )
        stalls = sum(s > STALL_S for s in seconds) / len(seconds)
        yield Row(
            "messages",
            f"{way}: stood still",
            100 * stalls,
            "%",
            note=f"more than {STALL_S * 1e3:g} ms",
        )


def measured(turns: int) -> dict[str, list[float]]:
    """Return the seconds of rank 0's messages, by way."""
    context = get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        ranks = [
            context.Process(target=_rank, args=(rank, store, turns, send), daemon=True)
            for rank in range(WORLD)
        ]
        for process in ranks:
            process.start()
        send.close()
        found: dict[str, list[float]] = received(receive, ranks)
        for process in ranks:
            process.join()
    return found


def received(pipe: Connection[Any, Any], ranks: Sequence[BaseProcess]) -> Any:
    """Return what comes out of a pipe from one of these processes.

    Raises RuntimeError where one of them has failed before: the others would wait for it for ever, so they are ended.
    """
    running = list(ranks)
    while True:
        ready = wait([pipe, *(process.sentinel for process in running)])
        codes = [process.exitcode for process in ranks]  # once: a process may end between two looks
        if failed := [f"rank {k} with exit code {code}" for k, code in enumerate(codes) if code]:
            for process in ranks:
                process.kill()
            raise RuntimeError(
                f"processes ended before they had measured: {', '.join(failed)}; what they printed "
                f"says why"
            )
        if pipe in ready:
            return pipe.recv()
        running = [process for process, code in zip(ranks, codes, strict=True) if code is None]


def _rank(rank: int, path: str, turns: int, pipe: Connection[Any, Any]) -> None:
    torch.set_num_threads(1)
    group = GlooCommunicators(dist.FileStore(path, WORLD), rank).group(
        "messages", list(range(WORLD))
    )
    cores = sorted(os.sched_getaffinity(0))
    threads = [int(thread) for thread in os.listdir("/proc/self/task")]
    sockets = [thread for thread in threads if os.sched_getscheduler(thread) == os.SCHED_BATCH]
    assert sockets, "the runtime has set no policy"
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(turns):
        for way, (yields, alone) in WAYS.items():
            for thread in sockets:
                os.sched_setscheduler(
                    thread, os.SCHED_BATCH if yields else os.SCHED_OTHER, os.sched_param(0)
                )
            for thread in threads:
                os.sched_setaffinity(thread, [cores[rank]] if alone else cores)
            found[way] += _seconds(group, rank)
    if rank == 0:
        pipe.send(found)


def _seconds(group: Any, rank: int) -> list[float]:
    """Return the seconds of each message, behind compute that ends on all ranks at once."""
    given, got, x = torch.zeros(NBYTES // 4), torch.zeros(NBYTES // 4), torch.randn(128, 128)
    start = torch.tensor([time.perf_counter() if rank == 0 else 0.0], dtype=torch.float64)
    group.allreduce([start]).wait()  # one machine has one clock
    out = []
    for k in range(1, MESSAGES + 1):
        moment = float(start) + k * APART_S
        time.sleep(max(0.0, moment - COMPUTE_S - time.perf_counter()))
        while time.perf_counter() < moment:
            torch.mm(x, x)
        begin = time.perf_counter()
        group.alltoall_base(got, given, [], []).wait()
        out.append(time.perf_counter() - begin)
    return out
