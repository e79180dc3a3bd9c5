"""Count captures and CPU seconds of `piper simulate` for Hugging Face's Llama 70B: `python -m
benchmarks.simulate_llama`.

It needs transformers. The command runs twice, each time in a process of its own, with an empty folder for captures
before the first: the second finds the capture that the first has kept. A further argument is the root of another tree
of Piper's, which is measured instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JOB = """
import functools
import torch
import transformers
import piper

LENGTH, ROWS = 4096, 512
CONFIG = transformers.LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
    vocab_size=128256, max_position_embeddings=8192,
)


def batch(step, rows):
    ids = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def optimizer(named):
    return torch.optim.AdamW([p for _, p in named], lr=1e-4)


model = functools.partial(transformers.LlamaForCausalLM, CONFIG)
job = piper.Job(model, batch, None, optimizer, global_batch=ROWS, precision=piper.Precision("bfloat16"))
strategy = piper.Strategy(
    piper.Mesh(pp=8, dp=4), (*piper.recipes.one_f_one_b(pp=8, microbatches=32), *piper.recipes.data_parallel(zero=1))
)
"""
COMMAND = """
import contextlib, io, json, sys, time
from piper.api import capturing
capture, captures = capturing._capture, []

def counted(*given, **more):
    captures.append(1)
    return capture(*given, **more)

capturing._capture = counted
from piper.cli import main
sys.argv = ["piper", "simulate", sys.argv[1], "--cluster", "h100x32"]
before = time.process_time()
with contextlib.redirect_stdout(io.StringIO()) as said:
    try:
        main()
    except SystemExit as end:
        code = end.code
print(json.dumps({"exit": code, "captures": len(captures), "cpu_s": round(time.process_time(), 1)}))
"""


def main() -> None:
    """Print a line for each of two runs of the command."""
    root = Path(sys.argv[1]).resolve() if sys.argv[1:] else ROOT
    paths = [root / "src", *root.glob("packages/*/src")]
    with tempfile.TemporaryDirectory() as name:
        job = Path(name, "llama.py")
        job.write_text(JOB)
        env = {
            **os.environ,
            "PIPER_CACHE": str(Path(name, "cache")),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "OMP_NUM_THREADS": "1",
        }
        for run in ("first", "second"):
            command = [sys.executable, "-c", COMMAND, str(job)]
            done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=name)
            if done.returncode:
                raise SystemExit(done.stderr)
            print(run, json.loads(done.stdout.splitlines()[-1]), flush=True)


if __name__ == "__main__":
    main()
