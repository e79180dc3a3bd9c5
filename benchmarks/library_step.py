"""Take a model of transformers' from its config.json to a simulated step: the first command, and the second.

python -m benchmarks.library_step llama3.1-8b 4 64 2
python -m benchmarks.library_step llama3-70b 16 512 4

Arguments: a public config.json, nodes of eight H100, rows of 8,192 tokens per step, and microbatches. The class of
transformers is captured, which must be installed, and replicas share all states. Each of the two commands is a process
of its own; the second finds the capture of the first. It prints CPU seconds after imports, by phase.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

IMPORTED = ("torch._dynamo", "transformers.models.llama.modeling_llama", "piper.planning.answers")


def measure(file: str, nodes: int, rows: int, microbatches: int) -> dict[str, float]:
    """Return the CPU seconds of each phase, and the simulated period."""
    for name in IMPORTED:
        import_module(name)
    import piper
    from piper.models.library import library_job
    from piper_ir.tools import no_garbage_collection

    directives = (
        *piper.recipes.one_f_one_b(pp=1, microbatches=microbatches),
        *piper.recipes.data_parallel(zero=3, bucket_mb=100),
    )
    strategy = piper.Strategy(piper.Mesh(dp=8 * nodes), directives)
    begin = time.process_time()
    with no_garbage_collection():  # as `piper simulate` does
        job = library_job(file, global_batch=rows, length=8192)
        compiled = piper.compile(job, strategy)
        planned = time.process_time()
        found = piper.simulate(compiled.plan, f"h100x8*{nodes}")
        end = time.process_time()
    return {
        "compile": round(planned - begin, 2),
        "simulate": round(end - planned, 2),
        "all": round(end - begin, 2),
        "period_s": found.period_s,
    }


def main(name: str, *numbers: str) -> None:
    """Print what both commands took."""
    from tests.planning.public_configs import PUBLIC

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        fields = PUBLIC[name][0] | {"rope_scaling": None}  # which is written down in part
        file.write_text(json.dumps(fields), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.library_step", str(file), *numbers]
        cache = os.environ | {"PIPER_CACHE": str(Path(folder) / "cache")}
        for which in ("first", "second"):
            done = subprocess.run(command, env=cache, capture_output=True, text=True, check=True)
            print(name, which, done.stdout.strip(), flush=True)


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    if name.endswith(".json"):
        nodes, rows, microbatches = map(int, numbers)
        print(json.dumps(measure(name, nodes, rows, microbatches)))
    else:
        main(name, *numbers)
