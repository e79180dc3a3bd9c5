"""Check what one CUDA device can prove: predictions, memory, waits between streams, ranks that share device, states or
work.

`make gpu-check` runs it, or

python benchmarks/gpu_check.py                a table to paste, and a JSON file in benchmarks/results/
python benchmarks/gpu_check.py --out FILE.json
python benchmarks/gpu_check.py --states       only what ranks keep: these need torch and Piper's own packages alone
python benchmarks/gpu_check.py --layouts      only ranks that share the work of chunks (tp, cp, ep): they need no more

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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # run as a file, sys.path begins with this folder and not with the root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.nn.functional as F

import piper
from benchmarks import gpu, gpu_hazards, gpu_layouts, gpu_states
from benchmarks.gpu_predicted import Case, Goals
from benchmarks.measure import Goal, Row, machine
from piper import models
from piper.models.presets import Config
from piper_ops.pointwise.losses import cross_entropy, cross_entropy_dgrad
from piper_runtime.launch import Pool
from piper_runtime.rank import using

if TYPE_CHECKING:
    from piper_simulator import Cluster

GOALS = Goals(Goal("below", 25), Goal("below", 10), Goal("below", 3))
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
        layers=2,
        width=1024,
        heads=16,
        kv_heads=8,
        hidden=3584,
        vocab=32_768,
        length=1024,
        qk_norm=True,
        experts=4,
        top_k=2,
    ),
}
"""Blocks of the sizes of models that one device holds; embedding and head are of a middling vocabulary."""
PROVES = ("streams", "shared", "sharded", "mixed", "layouts")
"""Sections in which a goal that is missed is a fault."""


def main(argv: list[str] | None = None) -> int:
    """Run every check; the exit code is as the module says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu-check-DATE.json")
    parser.add_argument(
        "--states",
        action="store_true",
        help="only the sections about what ranks keep (gpu_states.py)",
    )
    parser.add_argument(
        "--layouts",
        action="store_true",
        help="only ranks that share the work of chunks (gpu_layouts.py)",
    )
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was checked. Run this where torch.cuda.is_available()")
        return 0
    here = asdict(machine()) | gpu.device_facts()
    path = (
        options.out
        or Path(__file__).parent
        / "results"
        / f"gpu-check-{here['date'].replace(':', '')[:17]}.json"
    )
    rows, failed = checked(chosen(options.states, options.layouts))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(
            {"machine": here, "rows": [gpu.as_json(r) for r in rows], "failed": failed}, indent=1
        )
        + "\n"
    )
    print(table(here, rows, failed))
    print(f"{len(rows)} rows in {path}")
    return 1 if failed or any(r.section in PROVES and r.met is False for r in rows) else 0


def chosen(states: bool, layouts: bool) -> Iterator[Callable[[], Iterable[Row]]]:
    """Yield the sections that were asked for; without a wish all."""
    if not states and not layouts:
        yield from sections()
    if states:
        yield from gpu_states.sections()
    if layouts:
        yield layouts_here


def layouts_here() -> Iterator[Row]:
    """Return the rows of ranks that share the work of chunks on this device."""
    return gpu_layouts.shared_work("cuda", gpu_layouts.ways())


def sections() -> Iterator[Callable[[], Iterable[Row]]]:
    """Yield the sections; those with predictions, the first and the last two, need the simulator's packages."""
    yield lambda: blocks("cuda", eager_cluster(), BLOCKS)
    yield gpu_hazards.rows
    yield gpu.shared
    yield layouts_here
    yield from gpu_states.sections()
    yield lambda: gpu_states.overheads("cuda", eager_cluster())
    yield lambda: kernels(eager_cluster())


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
            f"| {r.section}: {r.name} | {r.value:.4g} | {r.unit} | {r.goal or ''} | {verdict} | "
            f"{r.note} |"
        )
    return "\n".join([*lines, *(f"\n**failed**: {f}" for f in failed)])


def blocks(
    device: str, cluster: Cluster, sizes: dict[str, Config], global_batch: int = ROWS
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
            compiled = [piper.compile(work, s) for s in strategies]
            costs = piper.profile(
                work,
                strategies[0],
                rows=[c.plan.rows for c in compiled],
                repeats=REPEATS,
                pool=pool,
            )
            for found, m in zip(compiled, MICROBATCHES, strict=True):
                title = f"bfloat16, {name}, {found.plan.rows} x {config.length} tokens, m={m}"
                case = Case(title, found, GOALS)
                case.measure(cluster, costs, pool)
                yield from case.rows()


def kernels(cluster: Cluster) -> Iterator[Row]:
    """Measure what eager kernels reach of the data sheet, at the sizes of a block.

    Products of matrices are compared with their peak in bfloat16, the others with the memory's bandwidth by the bytes
    that they must read and write.
    """
    tokens, width, vocab = 4096, 2048, 32_768
    random = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    for m, k, n in (
        (tokens, width, width),
        (tokens, width, 3 * width),
        (tokens, width, 4 * width),
        (tokens, 4 * width, width),
        (tokens, width, vocab),
    ):
        a, b = random(m, k), random(n, k)
        seconds = gpu.device_seconds(partial(F.linear, a, b))
        share = 2 * m * k * n / seconds / cluster.device.peak("bfloat16")
        yield Row(
            "kernel",
            f"linear, {m} x {k} -> {n}, bfloat16",
            100 * share,
            "% of peak",
            note=f"{seconds * 1e6:.1f} us",
        )
    x, y, weight = random(tokens, 4 * width), random(tokens, 4 * width), random(4 * width)
    logits, targets = random(tokens, vocab), torch.randint(vocab, (tokens,), device="cuda")
    loss, lse = cross_entropy(logits, targets)
    moved: dict[str, tuple[Callable[[], object], int]] = {
        f"add, {tokens} x {4 * width}": (partial(torch.add, x, y), 3 * x.nbytes),
        f"gelu, {tokens} x {4 * width}": (partial(F.gelu, x), 2 * x.nbytes),
        f"silu, {tokens} x {4 * width}": (partial(F.silu, x), 2 * x.nbytes),
        f"cat of two halves, {tokens} x "
        f"{4 * width}": (lambda: torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1), 2 * x.nbytes),
        f"layer norm, {tokens} x "
        f"{4 * width}": (partial(F.layer_norm, x, (4 * width,), weight, weight), 2 * x.nbytes),
        f"cross-entropy, {tokens} x "
        f"{vocab}": (partial(cross_entropy, logits, targets), logits.nbytes),
        f"cross-entropy, gradient, {tokens} x {vocab}": (
            partial(cross_entropy_dgrad, torch.ones_like(loss), logits, targets, lse), 2 * logits.nbytes,
        ),
    }  # fmt: skip
    for name, (call, nbytes) in moved.items():
        seconds = gpu.device_seconds(call)
        share = nbytes / seconds / cluster.device.memory_bandwidth
        yield Row(
            "kernel",
            f"{name}, bfloat16",
            100 * share,
            "% of bandwidth",
            note=f"{seconds * 1e6:.1f} us",
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
