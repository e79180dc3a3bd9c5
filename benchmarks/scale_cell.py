"""Take one large model on many devices from the model to the simulated step, in this process.

python -m benchmarks.scale_cell gpt3-175b 16 64 128 h100x8*128 [zero [bucket_mb [tp [cp]]]]

Arguments: a preset of `piper.models`, pipeline stages, replicas, microbatches of one row, a cluster, the level at
which replicas share states (0), the MiB of a bucket (25), the devices that share each layer with its tokens (1), and
those that share its tokens alone, context parallelism by heads (1). It prints one JSON object: CPU and wall seconds of
each phase, the most memory that the process took, and facts of the plan. It simulates with contention.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

os.environ["PIPER_CACHE"] = ""  # the capture is a phase
T = TypeVar("T")
PHASES = ("import", "capture", "compile", "verify", "simulate")


class Clock:
    """Keep CPU and wall seconds of named phases."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = {}
        self.wall: dict[str, float] = {}

    def time(self, phase: str, call: Callable[[], T]) -> T:
        cpu, wall = time.process_time(), time.perf_counter()
        found = call()
        self.cpu[phase] = round(time.process_time() - cpu, 3)
        self.wall[phase] = round(time.perf_counter() - wall, 3)
        return found


def measure(
    model: str | Any,
    pp: int,
    dp: int,
    microbatches: int,
    cluster: str,
    zero: int = 0,
    bucket_mb: int = 25,
    tp: int = 1,
    cp: int = 1,
) -> dict[str, Any]:
    """Measure every phase; `model` is a preset's name, or sizes.

    It captures anew unless this process has captured a job of the same sizes.
    """
    clock = Clock()

    def imported() -> Any:
        import torch._dynamo

        import piper

        return piper, torch._dynamo

    piper, _ = clock.time("import", imported)
    from piper import models
    from piper.api.captures.capturing import captured_job
    from piper_ir.tools import no_garbage_collection
    from piper_ir.verify import verify

    job = models.job(model, global_batch=microbatches * dp)
    replicas = piper.recipes.data_parallel(over=("dp",), zero=zero, bucket_mb=bucket_mb)
    shared = [piper.shard(piper.where(), stream="tokens")] if tp > 1 else []
    tokens = [piper.shard(piper.where(), over="cp", index="tokens")] if cp > 1 else []
    directives = (
        shared,
        tokens,
        piper.recipes.one_f_one_b(pp=pp, microbatches=microbatches),
        replicas,
    )
    strategy = piper.Strategy(
        piper.Mesh(pp=pp, dp=dp, cp=cp, tp=tp), [d for part in directives for d in part]
    )
    clock.time("capture", lambda: captured_job(job))
    compiled = clock.time("compile", lambda: piper.compile(job, strategy))
    with no_garbage_collection():  # as the command line predicts
        clock.time("verify", lambda: verify(compiled.plan))
        found = clock.time("simulate", lambda: piper.simulate(compiled.plan, cluster))
    return {
        "cpu_s": clock.cpu,
        "wall_s": clock.wall,
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "ranks": compiled.plan.mesh.world,
        "roles": len(compiled.plan.roles),
        "nodes": len(compiled.graph.nodes),
        "instructions": sum(len(role.program) for role in compiled.plan.roles),
        "step_s": found.step_s,
        "mfu": found.mfu,
        "peak_bytes": max(found.peak_bytes),
    }


if __name__ == "__main__":
    name, pp, dp, microbatches, where, *level = sys.argv[1:]
    print(json.dumps(measure(name, int(pp), int(dp), int(microbatches), where, *map(int, level))))
