"""Print the simulated seconds of a step whose products are computed in pieces, beside the messages of other pieces.

`python benchmarks/pieces.py` plans Llama 3 8B on devices of one node that share its layers, with one row of 8,192
tokens; it takes a minute, and nothing runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":  # run as a file, sys.path begins with this folder and not with the root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import piper
from piper import Mesh, Strategy, models, recipes

CLUSTER = "h100x8"
DEVICES = (2, 4, 8)
PIECES = (1, 2, 4, 8)


def rows() -> Iterator[str]:
    """Yield a line for each number of devices."""
    sizes = models.LlamaConfig(
        layers=32, width=4096, heads=32, kv_heads=8, hidden=14336, vocab=128256, length=8192
    )
    job = models.job(sizes, global_batch=1, precision="bfloat16")
    for tp in DEVICES:
        seconds = []
        for pieces in PIECES:
            shared = recipes.tensor_parallel(sequence=True, pieces=pieces)
            plan = piper.compile(job, Strategy(Mesh(tp=tp), shared)).plan
            seconds.append(piper.simulate(plan, CLUSTER).step_s)
        yield f"{tp:>3}" + "".join(f" {1000 * s:>9.1f}" for s in seconds)


def main() -> int:
    """Print the table."""
    print(f"milliseconds of a step on {CLUSTER}, with contention")
    print(f"{'tp':>3}" + "".join(f" {f'{pieces} pieces':>9}" for pieces in PIECES))
    for row in rows():
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
