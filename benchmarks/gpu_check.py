"""Check what one CUDA device can prove: predictions, memory, waits between streams, ranks that share device, states or
work.

`make gpu-check` runs it, or

python benchmarks/gpu_check.py                a table to paste, and a JSON file in benchmarks/results/
python benchmarks/gpu_check.py --out FILE.json
python benchmarks/gpu_check.py --states       only what ranks keep: these need torch and Piper's own packages alone
python benchmarks/gpu_check.py --layouts      only ranks that share the work of chunks (tp, cp, ep): they need no more
python benchmarks/gpu_check.py --kernels      only compiled steps beside eager ones and plain torch
python benchmarks/gpu_check.py --offload      only tensors that wait on the host: they need no more
python benchmarks/gpu_check.py --graphs       only steps that are CUDA graphs: they need no more

Without a device it says so and exits 0. Exit code 1 when a check of correctness failed or could not run; an error of a
prediction that misses its goal is a result.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # run as a file, sys.path begins with this folder and not with the root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

import piper
from benchmarks import (
    gpu,
    gpu_graphs,
    gpu_hazards,
    gpu_kernels,
    gpu_layouts,
    gpu_offload,
    gpu_states,
)
from benchmarks.measure import Row, machine
from piper import models
from piper.models import DecoderConfig
from piper_runtime.launch import Pool
from piper_runtime.rank import using

if TYPE_CHECKING:
    from piper_simulator import Cluster

ROWS, REPEATS = 32, 5
"""Of the global batch of a step; of a profile."""
MICROBATCHES = (8, 4)
BLOCKS = {
    "GPT, width 2048, 2 blocks": models.GPTConfig(
        layers=2, width=2048, heads=16, vocab=32_768, length=1024
    ),
    "Llama, width 2048, 2 blocks, 4 key heads": models.LlamaConfig(
        layers=2, width=2048, heads=16, kv_heads=4, hidden=7168, vocab=32_768, length=1024
    ),
    "MoE, width 1024, 2 blocks, 2 of 4 experts": models.MoEConfig(
        layers=2, width=1024, heads=16, kv_heads=8, hidden=3584, vocab=32_768, length=1024, qk_norm=True,
        experts=4, top_k=2,
    ),
}  # fmt: skip
"""Blocks of the sizes of models that one device holds; embedding and head are of a middling vocabulary."""
PROVES = ("streams", "sharded", "mixed", "layouts", "offload", "graphs")
"""Sections in which a goal that is missed is a fault."""


def main(argv: list[str] | None = None) -> int:
    """Run every check; the exit code is as the module says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu-check-DATE.json")
    for name, of in (
        ("--states", "what ranks keep"),
        ("--layouts", "ranks that share chunks"),
        ("--kernels", "compiled steps"),
        ("--offload", "tensors that wait on the host"),
        ("--graphs", "steps that are CUDA graphs"),
    ):
        parser.add_argument(name, action="store_true", help=f"only the sections about {of}")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was checked. Run this where torch.cuda.is_available()")
        return 0
    here = asdict(machine()) | gpu.device_facts()
    day = here["date"].replace(":", "")[:17]
    path = options.out or Path(__file__).parent / "results" / f"gpu-check-{day}.json"
    rows, failed = checked(
        chosen(options.states, options.layouts, options.offload, options.kernels, options.graphs)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": here, "rows": [gpu.as_json(r) for r in rows], "failed": failed}
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(table(here, rows, failed))
    print(f"{len(rows)} rows in {path}")
    return 1 if failed or any(r.section in PROVES and r.met is False for r in rows) else 0


def chosen(
    states: bool,
    layouts: bool,
    offload: bool = False,
    kernels: bool = False,
    graphs: bool = False,
) -> Iterator[Callable[[], Iterable[Row]]]:
    """Yield the sections that were asked for; without a wish all."""
    if not any((states, layouts, offload, kernels, graphs)):
        yield from sections()
    if states:
        yield from gpu_states.sections()
    if layouts:
        yield layouts_here
    if kernels:
        yield kernels_here
    if offload:
        yield from gpu_offload.sections()
    if graphs:
        yield from gpu_graphs.sections()


def layouts_here() -> Iterator[Row]:
    """Return the rows of ranks that share the work of chunks on this device."""
    return gpu_layouts.shared_work("cuda", gpu_layouts.ways())


def kernels_here() -> Iterator[Row]:
    """Return the rows of compiled steps on this device."""
    dense = {name: config for name, config in BLOCKS.items() if config.experts is None}
    return gpu_kernels.compared("cuda", dense, "bfloat16", ROWS, MICROBATCHES[0])


def sections() -> Iterator[Callable[[], Iterable[Row]]]:
    """Yield the sections; those with predictions, the first and the last, need the simulator's packages."""
    yield lambda: blocks("cuda", eager_cluster(), BLOCKS)
    yield gpu_hazards.rows
    yield layouts_here
    yield kernels_here
    yield from gpu_states.sections()
    yield from gpu_offload.sections()
    yield from gpu_graphs.sections()
    yield lambda: gpu_states.overheads("cuda", eager_cluster())


def eager_cluster() -> Cluster:
    """Return the devices of this machine as they run eager kernels, which is what runs here."""
    from piper_simulator import STACKS, product_cluster

    plain = product_cluster(torch.cuda.get_device_name(0), torch.cuda.device_count())
    return plain.each_device(lambda device: replace(device, stack=STACKS["eager"]))


def checked(sections: Iterable[Callable[[], Iterable[Row]]]) -> tuple[list[Row], list[str]]:
    """Return the rows of all sections, each printed as it comes, and what failed."""
    rows, failed = list[Row](), list[str]()
    for section in sections:
        begin = time.perf_counter()
        try:
            for row in section():
                rows.append(row)
                print(gpu.line(row), flush=True)
        except (
            Exception
        ) as e:  # what was checked before, and the other sections, are still worth having
            traceback.print_exc()
            failed.append(f"{type(e).__name__}: {e}")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(f"  {time.perf_counter() - begin:.0f} s", flush=True)
    return rows, failed


def table(here: dict[str, object], rows: Sequence[Row], failed: Sequence[str]) -> str:
    """Return everything as Markdown."""
    lines = [
        " | ".join(f"{k} {v}" for k, v in here.items()),
        "",
        "| check | value | unit | goal | | note |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        verdict = "" if r.met is None else "met" if r.met else "**missed**"
        lines.append(
            f"| {r.section}: {r.name} | {r.value:.4g} | {r.unit} | {r.goal or ''} | {verdict} | {r.note} |"
        )
    return "\n".join([*lines, *(f"\n**failed**: {f}" for f in failed)])


def blocks(
    device: str, cluster: Cluster, sizes: dict[str, DecoderConfig], global_batch: int = ROWS
) -> Iterator[Row]:
    """Measure blocks of each model in bfloat16, eager.

    The step by formula and from one profile per model is compared with a run in a process; the peak of the plan with
    what torch's allocator was asked for (live storages on a CPU).
    """
    with using(device), Pool(1) as pool:
        for name, config in sizes.items():
            work = models.job(config, global_batch=global_batch, precision="bfloat16")
            strategies = [
                piper.Strategy(piper.Mesh(pp=1), (piper.split(piper.where(), microbatches=m),))
                for m in MICROBATCHES
            ]
            plans = [piper.compile(work, s) for s in strategies]
            sizes_of = [compiled.plan.rows for compiled in plans]
            costs = piper.profile(work, strategies[0], rows=sizes_of, repeats=REPEATS, pool=pool)
            for compiled, m in zip(plans, MICROBATCHES, strict=True):
                title = f"bfloat16, {name}, {compiled.plan.rows} x {config.length} tokens, m={m}"
                yield from gpu.predicted(title, compiled, cluster, costs, pool)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
