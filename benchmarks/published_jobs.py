"""Compile and simulate the jobs of examples/published: CPU seconds of each part, step time and memory, as a table.

    python benchmarks/published_jobs.py [NAME ...]

Each job has a process and an empty cache of its own. Loading runs the FILE.py, which is what `piper import` writes; the
imports of libraries do not count. MEASURED has the figures of the jobs' authors, in seconds per step and tokens per second
and GPU, with GiB that were allocated or (r) reserved, from the files that the jobs name. Megatron-LM writes the memory of
its last rank (training/global_vars.py: the rank world_size - 1 logs), so that rank's peak stands beside the fullest's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "published"
MEASURED = {
    "tt_llama3_8b": "5,762 tokens/s, 82.4 GiB (r)",
    "tt_llama3_70b": "597 tokens/s",
    "tt_llama3_405b": "100 tokens/s, 82.5 GiB (r)",
    "mb_llama3_70b_fp8": "1,664 tokens/s",
    "mlm_7b_tp4": "1.115 s, 53.2 GiB",
    "mlm_7b_pp4": "1.151 s, 56.6 GiB",
    "mlm_15b": "26.2 GiB (1.435 s for 384 rows, GPUs not stated)",
    "mlm_mixtral_8x7b": "3.303 s, 33.1 GiB (GPUs not stated)",
    "mlm_mixtral_8x22b": "6.914 s, 26.6 GiB (GPUs not stated)",
    "mlm_dsv3_proxy": "12.03 s, 43.4 GiB (GPUs not stated)",
    "mb_dsv3_gb200": "3,139 tokens/s",
    "mb_gpt_oss_120b": "5,824 tokens/s",
}


def measured(name: str) -> dict[str, object]:
    """Return the figures of one job, in this process."""
    import torch._dynamo  # noqa: F401 - its import is no part of a job

    import piper
    from piper.cli.loading import load_file

    clock = [time.process_time()]
    file = load_file(FOLDER / f"{name}.py")
    clock.append(time.process_time())
    compiled = piper.compile(file.job, file.strategy)
    clock.append(time.process_time())
    text = (FOLDER / f"{name}.py").read_text()
    cluster = text.partition('cluster = "')[2].partition('"')[0]
    simulation = piper.simulate(compiled.plan, cluster)
    clock.append(time.process_time())
    tokens = (file.job.tokens_per_row or 0) * file.job.global_batch
    return {
        "cluster": cluster,
        "seconds": [b - a for a, b in pairwise(clock)],
        "step": simulation.period_s,
        "rate": tokens / simulation.period_s / compiled.plan.mesh.world,
        "peak": max(simulation.held_bytes) / 2**30,
        "last": simulation.held_bytes[-1] / 2**30,
        "device": max(simulation.device_bytes) / 2**30,
        "fits": simulation.fits,
    }


def main(names: list[str]) -> int:
    """Print a row for each job; return 1 if one of them failed."""
    failed = 0
    print("| job | cluster | load | compile | simulate | step | tokens/s/GPU | GiB | measured |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in names or sorted(path.stem for path in FOLDER.glob("*.py")):
        with tempfile.TemporaryDirectory() as cache:
            run = subprocess.run(
                [sys.executable, __file__, "--one", name],
                capture_output=True,
                text=True,
                env={**os.environ, "PIPER_CACHE": cache},
            )
        if run.returncode:
            failed = 1
            print(f"| {name} | failed: {run.stderr.strip().splitlines()[-1][:200]} |", flush=True)
            continue
        row = json.loads(run.stdout.splitlines()[-1])
        seconds = " | ".join(f"{s:.1f}" for s in row["seconds"])
        rate = f"{row['rate']:,.0f}" if row["rate"] else "-"
        link = f"[{name}](../examples/published/{name}.py)"
        much = f", {row['device']:.1f} of the device: does not fit"
        last = f" (last rank {row['last']:.1f})" if row["last"] < row["peak"] else ""
        peak = f"{row['peak']:.1f}{last}{'' if row['fits'] else much}"
        print(
            f"| {link} | `{row['cluster']}` | {seconds} | {row['step']:.3f} s | {rate} | {peak} | "
            f"{MEASURED.get(name, '-')} |",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measured(sys.argv[2])))
    else:
        sys.exit(main(sys.argv[1:]))
