"""Describe this machine as a cluster, for predictions on "cpu-local".

It has its CUDA devices by their name, or a CPU that is measured. The measurement is rough on purpose: about a second,
one thread.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from statistics import median

import torch

from piper_runtime.engine import HEART_SLOTS
from piper_runtime.profile import host_seconds
from piper_runtime.rank import choose_device, default_kind
from piper_simulator import Cluster, cpu_local, product_cluster

REPEATS = 7


def devices_of_runs(world: int) -> Cluster:
    """Return the devices of runs of this many ranks that start here now: CUDA devices, else the CPU.

    See `piper_runtime.rank.values.device`. Ranks that share a CUDA device are predicted as if they did not, and `notes`
    says so.
    """
    if choose_device(default_kind(), 0).type == "cpu":
        return measured_cpu()
    count = torch.cuda.device_count()
    cluster = product_cluster(torch.cuda.get_device_name(0), count)
    if world <= count:
        return cluster
    shared = (
        f"{world} ranks share {count} of these, and what they take from each other is not simulated"
    )
    notes = "; ".join(filter(None, (cluster.device.notes, shared)))
    return replace(cluster, per_node=world).each_device(lambda device: replace(device, notes=notes))


@lru_cache(maxsize=1)
def measured_cpu() -> Cluster:
    """Return this machine's CPU as a cluster, measured on one thread.

    Matrix-product rate, memory bandwidth, and the cost of a small operator and of an instruction are measured. The
    links keep their default constants. Durations computed from it have the source "formula".
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return cpu_local(
                matmul_flops=_matmul_rate(),
                memory_bandwidth=_bandwidth(),
                launch_s=_small_op(),
                host_issue_s=_instruction(),
                memory_bytes=_memory_of_a_rank(),
            )
    finally:
        torch.set_num_threads(threads)


def _memory_of_a_rank() -> int:
    """Return a rank's share of this machine's memory, with one rank per core."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (os.cpu_count() or 1)


def _best(call: Callable[[], object]) -> float:
    """Return the least seconds of a few calls, after a warm-up."""
    call()
    least = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - begin)
    return least


def _matmul_rate(rows: int = 512, width: int = 512) -> float:
    """Measure FLOP/s of a float32 product of the size of a small transformer's layers."""
    a, b = torch.randn(rows, width), torch.randn(width, width)
    return 2 * rows * width * width / _best(lambda: a @ b)


def _bandwidth(elements: int = 1 << 21) -> float:
    """Measure bytes/s that an element-wise addition reads and writes, on tensors larger than the second-level cache."""
    a, b, result = torch.randn(elements), torch.randn(elements), torch.empty(elements)
    return 3 * 4 * elements / _best(lambda: torch.add(a, b, out=result))


def _small_op(calls: int = 2000) -> float:
    """Measure the seconds of an operator on one element, the least cost of a kernel."""
    a = torch.zeros(1)

    def run() -> None:
        for _ in range(calls):
            a.add(a)

    return _best(run) / calls


def _instruction() -> float:
    """Measure the issuing thread's seconds for an instruction and a message, without their work."""
    turns = list(host_seconds(array("q", [0] * HEART_SLOTS), range(1 + REPEATS)))[1:]
    return max(0.0, median(issue + talk for issue, talk in turns))
