"""Check on one CUDA device tensors that wait for their backward in the memory of the host, and an optimizer there.

`benchmarks/gpu_check.py` runs this section. It needs torch and Piper's own packages alone, and the launcher
`processes`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

import piper
from benchmarks.gpu import EQUAL, difference, error_row, peak_errors
from benchmarks.measure import Goal, Row
from benchmarks.step_model import Regime, job
from piper import models
from piper.models import DecoderConfig
from piper_ir.fold.memory import on_device
from piper_runtime.launch import WARMUP_STEPS, Pool
from piper_runtime.rank import using

SMALL = Regime(
    "in float64", width=256, heads=4, layers=4, context=64, rows=4, microbatches=4, steps=1
)
BLOCKS = models.LlamaConfig(
    layers=6, width=2048, heads=16, kv_heads=4, hidden=7168, vocab=8192, length=1024
)
ROWS, MICROBATCHES, STEPS = 16, 4, 8
PEAK, LOSSES, BYTES = Goal("below", 0.1), Goal("below", 0.5), Goal("below", 1)
HIDDEN, SMALLER = Goal("below", 1.1), Goal("below", 1)
COPIED = 1 << 28
"""The bytes of a copy whose rate is measured."""


def sections(device: str = "cuda") -> Iterator[partial[Iterator[Row]]]:
    """Yield the sections."""
    yield partial(rates, device)
    yield partial(equal, device)
    yield partial(moved, device, BLOCKS)


def rates(device: str, nbytes: int = COPIED) -> Iterator[Row]:
    """Measure the link between device and host each way, and both ways at once, with pinned memory."""
    here = torch.device(device)
    pin = here.type == "cuda"
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=here) for _ in range(2)]
    ways = {"to the host": [(host[0], there[0])], "from the host": [(there[1], host[1])]}
    ways["both ways, each"] = [pair for pairs in list(ways.values()) for pair in pairs]
    for name, pairs in ways.items():
        rate = nbytes / _copied_s(pairs, pin) / 1e9
        yield Row("offload", f"copies of {nbytes / 2**20:.0f} MiB {name}", rate, "GB/s")


def _copied_s(pairs: list[tuple[torch.Tensor, torch.Tensor]], cuda: bool, times: int = 8) -> float:
    """Return the seconds of copies that run at the same time, each on a stream of its own."""
    if not cuda:
        first = time.perf_counter()
        for target, source in pairs * times:
            target.copy_(source)
        return (time.perf_counter() - first) / times
    streams = [torch.cuda.Stream() for _ in pairs]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for n in (1, times):  # the first round pays for the first use
        torch.cuda.synchronize()
        begin.record()
        for stream, (target, source) in zip(streams, pairs, strict=True):
            stream.wait_event(begin)
            with torch.cuda.stream(stream):
                for _ in range(n):
                    target.copy_(source, non_blocking=True)
            torch.cuda.current_stream().wait_stream(stream)
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def equal(device: str, regime: Regime = SMALL) -> Iterator[Row]:
    """Compare runs in float64 whose every tensor waits on the host with the run of a plan without."""
    work = replace(
        job(regime, regime.rows * regime.microbatches), precision=piper.Precision(params="float64")
    )
    base = piper.recipes.gpipe(pp=1, microbatches=regime.microbatches)
    ways = {
        "all tensors": (piper.offload(piper.where(), least_mb=0),),
        "the optimizer": (piper.offload(piper.where(), tensors="optim"),),
        "all states": (piper.offload(piper.where(), tensors="states"),),
        "prefetch=0": (piper.offload(piper.where(), prefetch=0, least_mb=0),),
        "inputs of recomputed layers": (
            piper.recompute(piper.where(), keep="inputs"),
            piper.offload(piper.where(), tensors="inputs", least_mb=0),
        ),
    }
    with using(device), Pool(1) as pool:
        run = partial(piper.execute, steps=3, launcher="processes", pool=pool)
        alone = run(piper.compile(work, piper.Strategy(piper.Mesh(pp=1), base)))
        for name, more in ways.items():
            compiled = piper.compile(work, piper.Strategy(piper.Mesh(pp=1), (*base, *more)))
            unlike = difference(run(compiled), alone)
            yield Row("offload", f"float64, {name}: difference", unlike, "relative", goal=EQUAL)


def ways_of(
    config: DecoderConfig, rows: int, least_mb: float
) -> Iterator[tuple[str, piper.Job, piper.Strategy]]:
    """Yield a job with the strategies that are compared, the first of each pair without copies."""
    work = models.job(config, global_batch=rows)
    base = piper.recipes.gpipe(pp=1, microbatches=MICROBATCHES)
    again = (*base, piper.recompute(piper.where(), keep="inputs"))
    moves = partial(piper.offload, piper.where(), least_mb=least_mb)
    for name, directives in {
        "without": base,
        "all tensors": (*base, moves()),
        "the optimizer": (*base, piper.offload(piper.where(), tensors="optim")),
        "all states": (*base, piper.offload(piper.where(), tensors="states")),
        "without, recomputed": again,
        "inputs of recomputed layers": (*again, moves(tensors="inputs")),
    }.items():
        yield name, work, piper.Strategy(piper.Mesh(pp=1), directives)


def moved(
    device: str, config: DecoderConfig, rows: int = ROWS, least_mb: float = 1.0
) -> Iterator[Row]:
    """Compare peaks and bytes on the host with the plan's, and steps and losses with the plan without copies.

    Inputs of recomputed layers are few bytes, whose copies compute should hide. All tensors are more than the link
    moves meanwhile: the row says by how much a step is longer then.
    """
    before: tuple[piper.Run, float] | None = None
    with using(device), Pool(1) as pool:
        for name, work, strategy in ways_of(config, rows, least_mb):
            compiled = piper.compile(work, strategy)
            run = piper.execute(
                compiled, steps=WARMUP_STEPS + STEPS, launcher="processes", pool=pool
            )
            period = run.period_s or math.nan
            planned, taken, note = peak_errors(on_device(compiled.plan, device), run.peak_bytes)
            error = 100 * (planned / taken - 1)
            yield error_row("offload", f"{name}: peak memory", error, PEAK, note)
            if "without" in name:
                before = run, period
                continue
            assert before is not None
            yield from _against(name, run, period, before, compiled.plan.roles[0].host_peak_bytes)


def _against(
    name: str, run: piper.Run, period: float, before: tuple[piper.Run, float], hosted: int
) -> Iterator[Row]:
    """Return the rows of a run, against the run of the plan without copies."""
    without, without_s = before
    off = max(abs(a / b - 1) for a, b in zip(run.losses, without.losses, strict=True))
    yield Row("offload", f"{name}: losses", 100 * off, "% apart", goal=LOSSES)
    apart = abs(run.memory[0].host - hosted)
    note = f"planned {hosted / 2**20:.0f} MiB on the host"
    yield Row(
        "offload",
        f"{name}: bytes on the host beside the plan",
        apart,
        "bytes",
        goal=BYTES,
        note=note,
    )
    share = run.peak_bytes[0] / without.peak_bytes[0]
    yield Row("offload", f"{name}: peak over the peak without", share, "ratio", goal=SMALLER)
    goal = HIDDEN if "recomputed" in name else None
    times = f"{1e3 * period:.1f} ms against {1e3 * without_s:.1f}"
    yield Row(
        "offload",
        f"{name}: step over the step without",
        period / without_s,
        "ratio",
        goal=goal,
        note=times,
    )
