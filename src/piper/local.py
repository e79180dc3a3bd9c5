"""A short measurement of this machine, for predictions on "cpu-local". Rough on purpose: about a second, one thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import lru_cache

import torch

from piper_simulator import Cluster, cpu_local

REPEATS = 7


@lru_cache(maxsize=1)
def measured_cpu() -> Cluster:
    """This machine with matrix-product rate, memory bandwidth and the cost of a small operator as measured now, on one thread.
    The links keep their default constants. Source of durations computed from it: "formula"."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            memory = _memory_of_a_rank()
            return cpu_local(
                matmul_flops=_matmul_rate(), memory_bandwidth=_bandwidth(), launch_s=_small_op(), memory_bytes=memory
            )
    finally:
        torch.set_num_threads(threads)


def _memory_of_a_rank() -> int:
    """This machine's memory, shared by as many ranks as it has cores."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (os.cpu_count() or 1)


def _best(call: Callable[[], object]) -> float:
    """Least seconds of a few calls, after a warm-up."""
    call()
    out = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        out = min(out, time.perf_counter() - begin)
    return out


def _matmul_rate(rows: int = 512, width: int = 512) -> float:
    """FLOP/s of a float32 product of the size of a small transformer's layers."""
    a, b = torch.randn(rows, width), torch.randn(width, width)
    return 2 * rows * width * width / _best(lambda: a @ b)


def _bandwidth(elements: int = 1 << 21) -> float:
    """Bytes/s read and written by an element-wise addition on tensors that do not fit into the second-level cache."""
    a, b, out = torch.randn(elements), torch.randn(elements), torch.empty(elements)
    return 3 * 4 * elements / _best(lambda: torch.add(a, b, out=out))


def _small_op(calls: int = 2000) -> float:
    """Seconds of an operator on one element: what each kernel costs at least."""
    a = torch.zeros(1)

    def run() -> None:
        for _ in range(calls):
            a.add(a)

    return _best(run) / calls
