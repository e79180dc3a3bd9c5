"""Say where the CPU time of both sides of the experts' comparison is.

    python benchmarks/expert_costs.py            both sizes
    python benchmarks/expert_costs.py small 40   one of them, with so many pairs of runs

CPU time holds on a busy machine. What both threads take is measured in interleaved pairs without any profiler. Then a
dispatch mode takes the main thread's CPU time around each operator. What the operators do not have is Python, the
dispatcher, and what runs in gloo's own thread: its row has what is left of the main thread, and the other threads'.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import Any

if __name__ == "__main__":  # run as a file, sys.path begins with this folder and not with the root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.expert_model import LARGE, SMALL
from benchmarks.step_expert import prepared
from benchmarks.step_kinds import WORLD
from benchmarks.step_sides import Ours, Setup, theirs
from piper_runtime.rank import keep_freed_memory

SIZES = {"large": LARGE, "small": SMALL}
PAIRS = 20
CALLS = 20_000
"""The calls of the clock by which its own cost is known, which is taken off."""
MAIN, OTHERS = "outside of operators, main thread", "other threads"
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("optimizer", ("adam",)),
    ("matrix products", ("addmm", "_grouped_mm", "grouped_mm", "::mm", "::bmm")),
    ("attention", ("attention",)),
    ("collectives' calls", ("c10d::",)),
    (
        "rows to experts and back",
        (
            "embedding",
            "index",
            "gather",
            "scatter",
            "::cat",
            "_foreach_copy",
            "sort",
            "bincount",
            "topk",
        ),
    ),
    ("fills, gradients scaled", ("zero", "fill", "_foreach_div", "ones", "full")),
    (
        "views and allocations",
        (
            "view",
            "empty",
            "split",
            "slice",
            "::t",
            "transpose",
            "expand",
            "unbind",
            "select",
            "set_",
            "detach",
            "alias",
        ),
    ),
)
"""The parts of operators' names by kind; the first that fits counts, and the rest are norms, loss and element-wise
ops."""
REST = "norms, loss, element-wise"


class _Clocked(TorchDispatchMode):
    """Add up the main thread's CPU time by operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.seconds: Counter[str] = Counter()
        begin = time.thread_time()
        for _ in range(CALLS):
            time.thread_time()
        self._reading = (time.thread_time() - begin) / CALLS

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = time.thread_time()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.seconds[func.name()] += time.thread_time() - begin - self._reading


def kind_of(name: str) -> str:
    """Return the kind of an operator."""
    return next((kind for kind, parts in KINDS if any(part in name for part in parts)), REST)


def _costs(
    step: Callable[[], None], steps: int, threads: list[tuple[float, float]]
) -> dict[str, float]:
    """Return ms of CPU time per step by kind, and in all, given what steps take without the mode."""
    mode = _Clocked()
    with mode:
        for _ in range(steps):
            step()
    of_kinds: Counter[str] = Counter()
    for name, seconds in mode.seconds.items():
        of_kinds[kind_of(name)] += seconds * 1e3 / steps
    main, others = (median(side) for side in zip(*threads, strict=True))
    return {**of_kinds, MAIN: main - sum(of_kinds.values()), OTHERS: others}


def _work(setup: Setup, rank: int, path: str, pairs: int, pipe: Connection[Any, Any]) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(path, WORLD)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("torch", store),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=300),
    )
    sides = (Ours(setup, rank, store), theirs(setup, rank))
    for side in sides:
        for _ in range(3):
            side.step()
    threads: tuple[list[tuple[float, float]], ...] = ([], [])
    for _ in range(pairs):
        for side, found in zip(sides, threads, strict=True):
            dist.barrier()
            main, both = time.thread_time(), time.process_time()
            for _ in range(setup.regime.steps):
                side.step()
            main, both = (
                (now - was) * 1e3 / setup.regime.steps
                for now, was in ((time.thread_time(), main), (time.process_time(), both))
            )
            found.append((main, both - main))
    out = []
    for side, found in zip(sides, threads, strict=True):
        dist.barrier()
        out.append(_costs(side.step, pairs * setup.regime.steps, found))
    pipe.send(out)
    dist.barrier()
    os._exit(0)  # communicators have no orderly end while the other process may be gone already


def costs(name: str, pairs: int) -> None:
    """Print a table of one size: ms of CPU time per rank and step."""
    setup, context = prepared(SIZES[name]), multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="piper-bench-") as folder:
        pipes, processes = [], []
        for rank in range(WORLD):
            ours, its = context.Pipe(duplex=False)
            processes.append(
                context.Process(
                    target=_work, args=(setup, rank, str(Path(folder, "store")), pairs, its)
                )
            )
            processes[-1].start()
            its.close()
            pipes.append(ours)
        found = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    sides = [
        {kind: mean(of[side].get(kind, 0.0) for of in found) for kind in _kinds()}
        for side in range(2)
    ]
    print(
        f"| {SIZES[name].name}: ms of CPU time per rank and step | ours | torch | ours - torch "
        f"|\n|---|---|---|---|"
    )
    for kind in sorted(_kinds(), key=lambda k: sides[1][k] - sides[0][k]):
        print(
            f"| {kind} | {sides[0][kind]:.1f} | {sides[1][kind]:.1f} | "
            f"{sides[0][kind] - sides[1][kind]:+.1f} |"
        )
    ours, torchs = (sum(side.values()) for side in sides)
    print(f"| together | {ours:.1f} | {torchs:.1f} | {ours - torchs:+.1f} |\n")


def _kinds() -> list[str]:
    return [*(kind for kind, _ in KINDS), REST, MAIN, OTHERS]


def main(argv: list[str]) -> None:
    """Print the tables of all sizes, or of the one that is named; a number behind it is how many pairs."""
    for size in argv[:1] or SIZES:
        costs(size, int(argv[1]) if len(argv) > 1 else PAIRS)


if __name__ == "__main__":
    main(sys.argv[1:])
