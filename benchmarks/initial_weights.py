"""Measure initial weights: the recorded constructor of Llama 3 405B, and the tensors of one rank of a smaller model.

Every part runs in a process of its own, so that its peak memory holds torch and that part only. The rank is the second
of eight pipeline stages of a Llama with 1.1e9 parameters, in float32: its weights are made by the recorded constructor,
and read from a safetensors file whose tensors are zeros.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.measure import Goal, Row
from piper import Job, models
from piper_runtime.rank import materialize
from piper_runtime.weights import LazyTensors

SMALL = models.LlamaConfig(
    layers=16, width=2048, heads=16, kv_heads=4, hidden=8192, vocab=32_000, length=2048
)
STAGES = 8
SECONDS_GOAL, MEMORY_GOAL, READ_GOAL = Goal("below", 5.0), Goal("below", 0.6), Goal("below", 1.05)
BASE_MIB = 300.0
"""The memory that a process may have beyond 1.2 times its own weights and the largest of them, in MiB."""


def peak_mib() -> float:
    """Return the most resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def recorded(preset: str) -> dict[str, float]:
    """Return seconds and peak memory of a constructor's recording."""
    job = replace(models.job(preset, global_batch=2), init="seeded")
    before, wall, cpu = peak_mib(), time.perf_counter(), time.process_time()
    materialize(job)
    return {
        "seconds": round(time.perf_counter() - wall, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "peak_gib": round(peak_mib() / 2**10, 3),
        "before_gib": round(before / 2**10, 3),
    }


def held_names(tensors: LazyTensors) -> list[str]:
    """Return the parameters of the second stage."""
    layers = range(SMALL.layers // STAGES, 2 * SMALL.layers // STAGES)
    return [name for name in tensors if name.startswith(tuple(f"layers.{k}." for k in layers))]


def of_one_rank(init: str) -> dict[str, float]:
    """Return the memory of a process that makes one rank's parameters, and the bytes that it reads."""
    job: Job = replace(models.job(SMALL, global_batch=2, precision="float32"), init=init)
    params = materialize(job).params
    assert isinstance(params, LazyTensors)
    part = params.part(held_names(params))
    read, wall = bytes_read(), time.perf_counter()
    own = {name: part[name] for name in part}
    seconds = time.perf_counter() - wall
    held = sum(t.nbytes for t in own.values())
    largest = max(t.nbytes for t in own.values())
    return {
        "own_mib": round(held / 2**20, 1),
        "largest_mib": round(largest / 2**20, 1),
        "peak_mib": round(peak_mib(), 1),
        "read_over_own": round((bytes_read() - read) / held, 4),
        "seconds": round(seconds, 2),
    }


def bytes_read() -> int:
    """Return the bytes that this process has read by system calls."""
    fields = dict(
        line.split(": ") for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    )
    return int(fields["rchar"])


def write_zeros(path: Path) -> None:
    """Write a safetensors file for the model, without holding it: a hole in the file reads as zeros."""
    with torch.device("meta"):
        state = SMALL.build().state_dict()
    header, end = {}, 0
    for name, tensor in state.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [end, end + 4 * tensor.numel()],
        }
        end += 4 * tensor.numel()
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def alone(function: Callable[[str], dict[str, float]], argument: str) -> dict[str, float]:
    """Return what a function returns in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, argument).result()


def rows(quick: bool) -> Iterator[Row]:
    """Return seconds and memory; they take as long with `quick`."""
    whole = alone(recorded, "llama3-405b")
    note = f"{whole['seconds']:.1f} s on the clock"  # other processes take time on a shared machine
    yield Row(
        "initial",
        "Llama 3 405B, constructor recorded",
        whole["cpu_seconds"],
        "CPU s",
        goal=SECONDS_GOAL,
        note=note,
    )
    note = f"of the process; {whole['before_gib']:.2f} GiB before"
    yield Row(
        "initial",
        "Llama 3 405B, peak memory",
        whole["peak_gib"],
        "GiB",
        goal=MEMORY_GOAL,
        note=note,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "zeros.safetensors"
        write_zeros(path)
        for what, init in (("seeded", "seeded"), ("safetensors", str(path))):
            found = alone(of_one_rank, init)
            goal = Goal("below", 1.2 * found["own_mib"] + found["largest_mib"] + BASE_MIB)
            note = (
                f"own weights {found['own_mib']:.0f} MiB, the largest {found['largest_mib']:.0f} "
                f"MiB, {found['seconds']:.1f} s"
            )
            yield Row(
                "initial",
                f"one rank, {what}: peak memory",
                found["peak_mib"],
                "MiB",
                goal=goal,
                note=note,
            )
            if init != "seeded":
                yield Row(
                    "initial",
                    "one rank, safetensors: bytes read over own",
                    found["read_over_own"],
                    "",
                    goal=READ_GOAL,
                )
