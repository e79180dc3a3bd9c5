"""Record the constructor of Llama 3 405B (goals 5 s and 0.6 GiB), and make the tensors of one rank of a smaller model.

`python -m benchmarks.initial_weights` prints one JSON object. Every part runs in a process of its own, so that its peak
memory holds torch and that part only. The rank is the second of eight pipeline stages of a Llama with 1.2e9 parameters,
in float32: its weights are made by the recorded constructor, and read from a safetensors file whose tensors are zeros.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from piper import Job, models
from piper_runtime.rank import materialize
from piper_runtime.weights import LazyTensors

SMALL = models.LlamaConfig(layers=16, width=2048, heads=16, kv_heads=4, hidden=8192, vocab=32_000, length=2048)
STAGES = 8


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
    """Return the memory of a process that makes one rank's parameters, beyond that of one with torch and the recording."""
    job: Job = replace(models.job(SMALL, global_batch=2, precision="float32"), init=init)
    params = materialize(job).params
    assert isinstance(params, LazyTensors)
    part = params.part(held_names(params))
    before, read, wall = peak_mib(), bytes_read(), time.perf_counter()
    own = {name: part[name].clone() for name in part}
    seconds = time.perf_counter() - wall
    held = sum(t.nbytes for t in own.values())
    largest = max(t.nbytes for t in own.values())
    return {
        "own_mib": round(held / 2**20, 1),
        "largest_mib": round(largest / 2**20, 1),
        "more_mib": round(peak_mib() - before, 1),
        "read_over_own": round((bytes_read() - read) / held, 4),
        "seconds": round(seconds, 2),
    }


def bytes_read() -> int:
    """Return the bytes that this process has read by system calls."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines())
    return int(fields["rchar"])


def write_zeros(path: Path) -> None:
    """Write a safetensors file for the model, without holding it: a hole in the file reads as zeros."""
    with torch.device("meta"):
        state = SMALL.build().state_dict()
    header, end = {}, 0
    for name, tensor in state.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + 4 * tensor.numel()]}
        end += 4 * tensor.numel()
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def alone(function: Callable[[str], dict[str, float]], argument: str) -> dict[str, float]:
    """Return what a function returns in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, argument).result()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "zeros.safetensors"
        write_zeros(path)
        found = {
            "llama3-405b recorded": alone(recorded, "llama3-405b"),
            "one rank, seeded": alone(of_one_rank, "seeded"),
            "one rank, safetensors": alone(of_one_rank, str(path)),
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
