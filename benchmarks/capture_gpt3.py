"""Capture and cut GPT-3 175B (goals 15 s and 1 GiB), or another preset.

`python -m benchmarks.capture_gpt3 llama3-405b` captures another one. It prints one JSON object; `measure` does the work
in this process, whose peak memory then holds torch and the capture only.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from functools import partial

from piper import models
from piper_capture import capture
from piper_ir.ground.sizes import bind


def measure(name: str = "gpt3-175b") -> dict[str, float]:
    """Return seconds (wall), cpu_seconds, peak_gib of the process, chunks, codes, and saved_gib.

    The last is of one layer per row of the batch.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    job = models.job(name, global_batch=2)
    captured = capture(job.model, partial(job.batch, 0), job.loss, dtype=job.precision.dtype)
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    layer = captured.program.chunks[1]
    saved = sum(
        bind(spec.nbytes, 1) for port, spec in layer.ports.items() if port.startswith("saved")
    )
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "chunks": len(captured.program.chunks),
        "codes": len(captured.code),
        "parameters": sum(int(bind(p.spec.numel, 0)) for p in captured.program.params),
        "saved_gib_per_layer_and_row": round(saved / 2**30, 3),
    }


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:2])))
