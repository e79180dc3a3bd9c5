"""Check on one CUDA device that steps launched as CUDA graphs equal steps that the host issues, and time both.

`benchmarks/gpu_check.py` runs this section. It needs torch and Piper's own packages alone, and the launcher
`processes`. Two ranks that share the device are joined by NCCL's sockets. It has not run on a device yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import piper
from benchmarks.gpu import EQUAL, difference, joined_pool
from benchmarks.gpu_offload import SMALL
from benchmarks.measure import Goal, Row
from benchmarks.step_model import Regime, job
from piper import models
from piper.models import DecoderConfig
from piper_runtime.launch import WARMUP_STEPS, Pool
from piper_runtime.rank import using

KERNELS = models.GPTConfig(layers=4, width=512, heads=8, vocab=32_768, length=256)
"""A model of small kernels, whose steps wait for the host (docs/cuda.md)."""
ROWS, MICROBATCHES, STEPS = 32, 8, 8
FASTER = Goal("above", 1)


def sections(device: str = "cuda") -> Iterator[partial[Iterator[Row]]]:
    """Yield the sections."""
    yield partial(equal, device)
    yield partial(timed, device, KERNELS)


def equal(device: str, regime: Regime = SMALL) -> Iterator[Row]:
    """Compare runs in float64 on one rank and on two with the same runs without a graph."""
    work = replace(
        job(regime, regime.rows * regime.microbatches), precision=piper.Precision(params="float64")
    )
    ways = {
        "one rank": (1, piper.recipes.gpipe(pp=1, microbatches=regime.microbatches)),
        "1F1B": (2, piper.recipes.one_f_one_b(pp=2, microbatches=regime.microbatches)),
    }
    with using(device), joined_pool(2, "nccl") as pool:
        for name, (pp, directives) in ways.items():
            strategy = piper.Strategy(piper.Mesh(pp=pp), directives)
            issued, launched = (_run(work, strategy, pool, graph) for graph in (False, True))
            error = difference(launched, issued)
            yield Row("graphs", f"float64, {name}: from the run without", error, "", goal=EQUAL)


def timed(device: str, config: DecoderConfig, global_batch: int = ROWS) -> Iterator[Row]:
    """Time the steps of a model in bfloat16 with a graph and without."""
    work = models.job(config, global_batch=global_batch, precision="bfloat16")
    strategy = piper.Strategy(
        piper.Mesh(pp=1), (piper.split(piper.where(), microbatches=MICROBATCHES),)
    )
    with using(device), Pool(1) as pool:
        issued, launched = (_run(work, strategy, pool, g).period_s or 0.0 for g in (False, True))
    note = f"{1e3 * issued:.2f} ms/step issued, {1e3 * launched:.2f} launched"
    title = f"bfloat16, width {config.width}, {config.layers} layers: issued / launched"
    yield Row("graphs", title, issued / launched, "x", goal=FASTER, note=note)


def _run(work: piper.Job, strategy: piper.Strategy, pool: Pool, cuda_graph: bool) -> piper.Run:
    compiled = piper.compile(work, strategy, options=piper.Options(cuda_graph=cuda_graph))
    steps = WARMUP_STEPS + STEPS
    return piper.execute(compiled, steps=steps, launcher="processes", pool=pool, trace=False)
