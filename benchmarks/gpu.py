"""Measure one CUDA device: step time against plain torch, predictions, memory, host cost, and ranks that share it.

python benchmarks/gpu.py                 a table, and a JSON file in benchmarks/results/ (about two minutes on one H200)
python benchmarks/gpu.py --out FILE.json

Run it by hand, where there is a device; without one it says so and measures nothing. Figures: docs/cuda.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median

if __name__ == "__main__":  # run as a file, sys.path begins with this folder and not with the root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.distributed as dist

import piper
from benchmarks import noop
from benchmarks.gpu_predicted import Case, Goals
from benchmarks.gpu_sides import Ours, Setup, Side, Torch, engine_of, prepared
from benchmarks.joined import joined_pool
from benchmarks.measure import Goal, Row, machine, median_interval
from benchmarks.step_model import Regime, job
from piper_ir.fold.memory import on_device
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Compute
from piper_ops.attention.lowering import LoweringName
from piper_ops.attention.sdpa_kernels import KERNELS, AttentionOptions
from piper_runtime.launch import WARMUP_STEPS, Pool, rank_job
from piper_runtime.profile import most_on_device, reset_most_on_device
from piper_runtime.rank import Rank, materialize, using

LARGE = Regime(
    "kernels of 100 us and more",
    width=2048,
    heads=16,
    layers=2,
    context=1024,
    rows=8,
    microbatches=8,
    steps=1,
)
SINGLE = Regime(
    "in float32", width=1024, heads=16, layers=2, context=1024, rows=4, microbatches=8, steps=1
)
SMALL = Regime(
    "bound by launches", width=512, heads=8, layers=4, context=256, rows=4, microbatches=8, steps=1
)
REGIMES = ((LARGE, "bfloat16", 1), (SINGLE, "float32", 1), (SMALL, "bfloat16", 3))
"""Sizes, dtype, and how often a prediction is made and run: the speed of a host varies more than that of a device."""
SHARED = Regime(
    "in float64", width=256, heads=4, layers=4, context=64, rows=4, microbatches=4, steps=1
)
PAIRS, REPEATS, HOST_STEPS = 20, 5, 100
BOUND = 0.9
"""A host that has issued a step only after so much of it is what the step waits for."""
LAYERS, MICROBATCHES = 32, 16
"""Of the plan whose chunks compute nothing."""
SPEED, ERROR, MEMORY, EQUAL = (
    Goal("above", 0.98),
    Goal("below", 10),
    Goal("below", 2),
    Goal("below", 1e-9),
)
GOALS = Goals(None, ERROR, MEMORY)


def main(argv: list[str] | None = None) -> int:
    """Measure everything; the exit code is 0 without a device too."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu-DATE.json")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured. Run this where torch.cuda.is_available()")
        return 0
    here = asdict(machine()) | device_facts()
    print(" | ".join(f"{k} {v}" for k, v in here.items()), flush=True)
    path = (
        options.out
        or Path(__file__).parent / "results" / f"gpu-{here['date'].replace(':', '')[:17]}.json"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    # predicted is first: later this process has memory of the device
    for section in (predicted, compared, ceilings, host, shared):
        for row in section():
            rows.append(row)
            print(line(row), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        path.write_text(
            json.dumps({"machine": here, "rows": [as_json(r) for r in rows]}, indent=1) + "\n"
        )
    print(f"{len(rows)} rows in {path}")
    return 0


def device_facts() -> dict[str, str]:
    """Return what else a figure depends on."""
    facts = torch.cuda.get_device_properties(0)
    return {
        "device": f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB",
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "tf32": str(torch.backends.cuda.matmul.allow_tf32),
    }


def line(row: Row) -> str:
    """Return one row for people."""
    between = (
        f" [{row.low:.4g}, {row.high:.4g}]" if row.low is not None and row.high is not None else ""
    )
    goal = f"  goal {row.goal} {'met' if row.met else 'MISSED'}" if row.goal is not None else ""
    return f"{row.section:9} {row.name:72} {row.value:12.5g} {row.unit}{between}{goal}  {row.note}"


def as_json(row: Row) -> dict[str, object]:
    """Return one row for programs."""
    return asdict(row) | {"goal": None if row.goal is None else str(row.goal), "met": row.met}


def compared() -> Iterator[Row]:
    """Time ours and torch's loop in turns, in this process, and compare the memory of each.

    The ratio is the median of torch/ours over the pairs.
    """
    device = torch.device("cuda", 0)
    for regime, precision, _ in REGIMES:
        setup, title = prepared(regime, precision), name_of(regime, precision)
        sides: list[Side] = []
        for side in (Ours, Torch):
            found, rows = settled(side, setup, device, title)
            sides.append(found)
            yield from rows
        ours, torchs = sides
        check_losses(ours, torchs, precision)
        pairs = [turns(ours, torchs, first=k % 2) for k in range(PAIRS)]
        ratio, low, high = median_interval([t / o for o, t in pairs])
        issued = [median(side.issued_s[-PAIRS:]) * 1e3 for side in sides]
        note = (
            f"{PAIRS} interleaved pairs of steps, 95 % interval, whose lower end the goal is for; "
            f"host had issued after"
        )
        note += f" {issued[0]:.1f} (ours) and {issued[1]:.1f} ms (torch)"
        yield Row(
            "torch", f"{title}: torch/ours", ratio, "ratio", low, high, SPEED, note, judged=low
        )
        for side_name, times in zip(("ours", "torch"), zip(*pairs), strict=True):
            yield spread_row("torch", f"{title}: {side_name}", [t * 1e3 for t in times], "ms/step")
        if issued[0] > BOUND * median(o for o, _ in pairs) * 1e3:
            count = kernels(setup.plan)
            yield Row(
                "host",
                f"{title}: host per kernel",
                issued[0] * 1e3 / count,
                "us",
                note=f"{count} kernels in the plan",
            )
        del ours, torchs, sides, found
        gc.collect()
        torch.cuda.empty_cache()


def kernels(plan: Plan) -> int:
    """Return the kernels of the chunks in one step of a plan for one device, as its costs count them."""
    ops = [p.op for instr in plan.roles[0].program for p in instr.parts]
    return sum(
        k.count
        for op in ops
        if isinstance(op, Compute)
        for k in plan.chunk(op.chunk).steps[op.step].cost.kernels
    )


def name_of(regime: Regime, precision: str) -> str:
    sizes = (
        f"width {regime.width}, {regime.layers} layers, {regime.rows} x {regime.context} tokens, "
        f"m={regime.microbatches}"
    )
    return f"{precision}, {sizes}"


def settled(
    side: type[Ours] | type[Torch], setup: Setup, device: torch.device, title: str
) -> tuple[Side, list[Row]]:
    """Return a side after its first steps, and its peak of allocated memory above what was there before it."""
    reset_most_on_device(device)
    before = torch.cuda.memory_allocated(device)
    made = side(setup, device)
    for _ in range(WARMUP_STEPS):
        made.step()
    taken = most_on_device(device)
    torch.cuda.reset_peak_memory_stats(device)
    made.step()
    allocated = torch.cuda.max_memory_allocated(device) - before
    note = (
        "torch.cuda.max_memory_allocated above what was there before, kept workspaces of libraries "
        "included"
    )
    if not isinstance(made, Ours):
        return made, [
            Row("memory", f"{title}: torch, allocated", allocated / 2**20, "MiB", note=note)
        ]
    planned, counted = on_device(made.bound.plan, "cuda").roles[0].peak_bytes, made.counted()
    error = 100 * (planned / counted.peak - 1)
    asked = (
        f"planned {planned} bytes, {counted.peak} were asked for at the peak, {counted.states} of "
        f"them states"
    )
    return made, [
        Row(
            "memory",
            f"{title}: plan against requested bytes",
            abs(error),
            "% error",
            goal=MEMORY,
            note=asked,
        ),
        Row("memory", f"{title}: ours, allocated", allocated / 2**20, "MiB", note=note),
        Row(
            "memory",
            f"{title}: ours, with context and allocator",
            taken / 2**20,
            "MiB",
            note="of this process, by the driver",
        ),
    ]


def check_losses(ours: Side, torchs: Side, precision: str) -> None:
    """Raise RuntimeError unless both train the same: else there is nothing to compare."""
    loose = 1e-2 if precision == "bfloat16" else 1e-4
    if any(abs(a - b) > loose for a, b in zip(ours.losses, torchs.losses)):
        raise RuntimeError(f"the losses differ: {ours.losses[:4]} and {torchs.losses[:4]}")


def turns(ours: Side, torchs: Side, first: int) -> tuple[float, float]:
    """Return the seconds of one step of each; which goes first alternates."""
    took: dict[int, float] = {}
    for which in (first, 1 - first):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        (ours, torchs)[which].step()
        took[which] = time.perf_counter() - begin
    return took[0], took[1]


def spread_row(
    section: str, name: str, values: list[float], unit: str, note: str = "1st and 9th decile"
) -> Row:
    ordered = sorted(values)
    tenth = len(ordered) // 10
    return Row(section, name, median(ordered), unit, ordered[tenth], ordered[-1 - tenth], note=note)


def predicted() -> Iterator[Row]:
    """Predict steps of plans for one device by formula and from one profile, and run them in a process.

    There are three numbers of microbatches.
    """
    from piper_simulator import product_cluster

    cluster = product_cluster(torch.cuda.get_device_name(0), torch.cuda.device_count())
    with using("cuda"), Pool(1) as pool:
        for regime, precision, rounds in REGIMES:
            setups = [with_microbatches(regime, precision, m) for m in (8, 4, 16)]
            cases = [Case(name_of(s.regime, precision), s.compiled, GOALS) for s in setups]
            for _ in range(rounds):
                known, rows = setups[0], [s.plan.rows for s in setups]
                costs = piper.profile(
                    known.work, known.strategy, rows=rows, repeats=REPEATS, pool=pool
                )
                for case in cases:
                    case.measure(cluster, costs, pool)
            for case in cases:
                yield from case.rows()


def with_microbatches(regime: Regime, precision: str, m: int) -> Setup:
    """Return the same global batch in m microbatches."""
    rows = regime.rows * regime.microbatches // m
    return prepared(replace(regime, rows=rows, microbatches=m), precision)


def ceilings() -> Iterator[Row]:
    """Measure what the device reaches at best: matrix products by dtype, a copy, and each kernel of attention."""
    random = partial(torch.randn, device="cuda")
    for dtype, size in ((torch.bfloat16, 8192), (torch.float32, 4096), (torch.float64, 4096)):
        a, b = random(size, size, dtype=dtype), random(size, size, dtype=dtype)
        seconds = device_seconds(partial(torch.mm, a, b))
        yield Row(
            "ceiling",
            f"matrix product of {size}, {dtype}".replace("torch.", ""),
            2e-12 * size**3 / seconds,
            "TFLOP/s",
        )
    source = random(1 << 30, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    seconds = device_seconds(partial(target.copy_, source))
    yield Row("ceiling", "copy of 2 GiB, read and written", 2e-12 * source.nbytes / seconds, "TB/s")
    del source, target
    q, k, v, grad = (
        random(4, 1024, 16, 128, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)
    )
    options = AttentionOptions(None, True, 128**-0.5)
    names: tuple[LoweringName, ...] = ("cuda_cudnn", "cuda_flash", "cuda_efficient")
    for name in names:
        forward, backward = KERNELS[name]
        out, lse = forward(q, k, v, options)
        calls = {
            "forward": partial(forward, q, k, v, options),
            "backward": partial(backward, grad, q, k, v, out, lse, options),
        }
        for which, call in calls.items():
            note = "bfloat16, causal, 4 x 1024 tokens, 16 heads of 128"
            yield Row(
                "ceiling", f"attention {which}, {name}", device_seconds(call) * 1e6, "us", note=note
            )


def device_seconds(call: Callable[[], object], calls: int = 20) -> float:
    """Return the mean of some calls behind each other, by the device."""
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def host() -> Iterator[Row]:
    """Measure host microseconds per instruction of a plan whose chunks compute nothing.

    They are counted until the host has issued a step and until it is done. Loads copy a number to the device, and
    losses come back: these are most of it.
    """
    device = torch.device("cuda", 0)
    plan = noop.plan(1, LAYERS, MICROBATCHES)
    work = noop.job(plan)
    initial = materialize(work)
    bound = Rank(plan, 0, noop.CODE, rank_job(work), initial.params, initial.buffers, None, device)
    begin, issued, done = 0.0, list[float](), list[float]()
    engine = engine_of(bound, device, lambda: issued.append(time.perf_counter() - begin))
    for step in range(HOST_STEPS + 1):
        begin = time.perf_counter()
        engine.step(step)
        done.append(time.perf_counter() - begin)
    count = len(plan.roles[0].program)
    for name, seconds in (("issued", issued[1:]), ("step done", done[1:])):
        per = [s / count * 1e6 for s in seconds]
        yield spread_row("host", f"no-op plan, {count} instructions: {name}", per, "us/instr")


def shared() -> Iterator[Row]:
    """Compare ranks that share this device with one rank, in float64: losses and parameters of three steps.

    They go through gloo on pinned copies, and through NCCL, which takes each for a host of its own: its sockets say
    nothing of its speed.
    """
    recipes, m = piper.recipes, SHARED.microbatches
    size = SHARED.rows * m
    strategies = {
        "pp=2": piper.Strategy(piper.Mesh(pp=2), recipes.one_f_one_b(pp=2, microbatches=m)),
        "dp=2": piper.Strategy(
            piper.Mesh(dp=2),
            (piper.split(piper.where(), microbatches=m // 2), *recipes.data_parallel()),
        ),
        "pp=2, dp=2": piper.Strategy(
            piper.Mesh(pp=2, dp=2),
            (*recipes.one_f_one_b(pp=2, microbatches=m // 2), *recipes.data_parallel()),
        ),
    }
    work = replace(job(SHARED, size), precision=piper.Precision(params="float64"))
    one = piper.Strategy(piper.Mesh(pp=1), (piper.split(piper.where(), microbatches=m),))
    ways = {"gloo": "staged gloo"} | (
        {"nccl": "NCCL by sockets"} if dist.is_nccl_available() else {}
    )
    with using("cuda"):
        alone = piper.execute(piper.compile(work, one), steps=3, launcher="inline", memory=False)
        for how, by in ways.items():
            with joined_pool(4, how) as pool:
                for name, strategy in strategies.items():
                    run = piper.execute(
                        piper.compile(work, strategy),
                        steps=3,
                        launcher="processes",
                        memory=False,
                        pool=pool,
                    )
                    title = f"float64, {name} on one device, {by}: difference from one rank"
                    note = (
                        f"losses and {len(alone.state_dict())} tensors; "
                        f"{median(run.step_s) * 1e3:.1f} ms/step"
                    )
                    yield Row(
                        "shared", title, difference(run, alone), "relative", goal=EQUAL, note=note
                    )


def difference(run: piper.Run, alone: piper.Run) -> float:
    """Return the largest relative difference of their losses and of the tensors at their ends."""
    found, wanted = run.state_dict(), alone.state_dict()
    losses = [abs(a / b - 1) for a, b in zip(run.losses, alone.losses, strict=True)]
    return max(*losses, *(float((found[n] - t).norm() / t.norm()) for n, t in wanted.items()))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
