"""Compare steps with kernels of Inductor with the whole model under torch.compile, and with eager steps of both.

Ours makes all but products again (`keep="products/1"`), as torch.compile's partitioner does; a further side of ours
keeps all.
One process of one thread has all sides, which take turns; times are CPU seconds, of each side the least round. A
process before it has an empty cache of Inductor, so that there are first steps without and with kernels on disk. They
hold the CPU time of the C++ compiler.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch._inductor.compile_fx  # whose import is no compilation
import torch.distributed as dist

import piper
from benchmarks.measure import Goal, Row
from benchmarks.step_model import Regime, adamw
from benchmarks.step_sides import PLAIN, Ours, Setup, Side, TorchPlain, shipped_code
from benchmarks.step_worker import CHECKED_STEPS, check_same_training
from piper import models
from piper.models import DecoderConfig
from piper_ir.program.ops import KernelSource
from piper_runtime.rank import keep_freed_memory

MODELS: Mapping[str, DecoderConfig] = {
    "GPT": models.GPTConfig(layers=4, width=256, heads=4, vocab=4096, length=256),
    "Llama": models.LlamaConfig(layers=4, width=256, heads=4, hidden=688, vocab=4096, length=256),
}
FASTER = {"float32": 1.10, "bfloat16": 1.25}
"""The factor by which compiled steps shall be faster than our eager ones, by precision."""
AS_TORCH, WARM_S = Goal("above", 0.98), Goal("below", 3)
TORCH_EAGER = "eager torch"
ALL = "all"
"""The policy of the further side of ours."""
AS_LONG = Goal("below", 1.02)
ROUNDS = 15
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
"""The relative difference that losses of the first steps may have."""
T = TypeVar("T")


@dataclass(frozen=True)
class Seconds:
    """Hold the CPU seconds of each side's rounds, and of its first step, in which it compiles; `plan` lowers fusions.

    `activations` are the bytes that a plan of ours keeps of the forward where it holds most.
    """

    steps: dict[str, list[float]] = field(default_factory=dict)
    activations: dict[str, int] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)


def rows(quick: bool) -> Iterator[Row]:
    """Compare a GPT and a Llama in float32 and bfloat16; `quick`: one."""
    for name, config in [*MODELS.items()][: 1 if quick else None]:
        for precision in [*FASTER][: 1 if quick else None]:
            yield from compared(name, config, precision, 1 if quick else ROUNDS)


def compared(name: str, config: DecoderConfig, precision: str, rounds: int) -> Iterator[Row]:
    """Compare the sides of one model in one precision."""
    with tempfile.TemporaryDirectory(prefix="piper-bench-") as folder:
        cold, warm = (_in_a_process(config, precision, folder, n) for n in (0, rounds))
    least = {side: min(seconds) for side, seconds in warm.steps.items()}
    each = ", ".join(f"{side} {1e3 * s:.1f}" for side, s in least.items())
    faster = Goal("above", FASTER[precision])
    for side, goal in (("torch", AS_TORCH), ("eager", faster), (TORCH_EAGER, None)):
        ratio = least[side] / least["ours"]
        title = f"{name}, {precision}, one device, compiled: CPU time, {side}/ours"
        yield Row("step", title, ratio, "ratio", goal=goal, note=f"least; CPU ms/step {each}")
    mib = {side: nbytes / 2**20 for side, nbytes in warm.activations.items()}
    title = f"{name}, {precision}, one device, compiled: CPU time, keep=products/1 over all"
    note = f"least; activations {mib['ours']:.1f} MiB in place of {mib[ALL]:.1f}"
    yield Row("step", title, least["ours"] / least[ALL], "ratio", goal=AS_LONG, note=note)
    for found, disk, warm_goal in ((cold, "empty", None), (warm, "warm", WARM_S)):
        first = found.first
        title = f"{name}, {precision}, first compiled step, {disk} cache"
        note = f"the plan's fusions before {first['plan']:.1f}, torch.compile {first['torch']:.1f}"
        yield Row("step", title, first["ours"], "CPU s", goal=warm_goal, note=note)


def _in_a_process(config: DecoderConfig, precision: str, folder: str, rounds: int) -> Seconds:
    """Measure in a process of its own, whose cache of Inductor is in the folder."""
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(config, precision, folder, rounds, its))
    process.start()
    its.close()
    try:
        found: Seconds = ours.recv()
    except EOFError:
        raise RuntimeError("the process that measures failed; its output is above") from None
    finally:
        process.join()
    return found


def _work(
    config: DecoderConfig, precision: str, folder: str, rounds: int, pipe: Connection[Any, Any]
) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the CPU time of a pool would not be seen
    torch.set_num_threads(1)
    keep_freed_memory()  # as our workers do; it is for all sides
    pipe.send(measure(config, precision, rounds))


def measure(
    config: DecoderConfig, precision: str, rounds: int, rows: int = 4, microbatches: int = 4
) -> Seconds:
    """Measure the first steps, and some rounds; RuntimeError if the sides do not train the same."""
    given = models.job(config, global_batch=rows * microbatches, precision=precision)
    job = replace(given, optimizer=adamw)

    sizes = config.width, config.heads, config.layers, config.length, rows, microbatches
    regime = Regime("one device", *sizes, steps=1)

    found, sides = Seconds(), dict[str, Side]()

    def setup(kernels: KernelSource, side: str) -> Setup:
        cut = piper.split(piper.where(), microbatches=microbatches)
        kept = [piper.recompute(piper.where(layer=piper.ANY), ALL)] if side == ALL else []
        strategy = piper.Strategy(piper.Mesh(pp=1), (cut, *kept))
        made = piper.compile(job, strategy, options=piper.Options(kernels=kernels))
        found.activations[side] = made.plan.roles[0].peak_by_category.get("activation", 0)
        return Setup(PLAIN, regime, job, made.plan, shipped_code(made), compiled=True)

    def begin(side: str, make: Callable[[], Side]) -> None:
        sides[side] = make()
        sides[side].step()

    eager = setup("eager", "eager")  # which captures the model for both
    begin("eager", lambda: Ours(eager, 0, dist.HashStore()))
    compiled, found.first["plan"] = _cpu_seconds(lambda: setup("inductor", "ours"))
    keeps = setup("inductor", ALL)
    for side, make in (
        ("ours", lambda: Ours(compiled, 0, dist.HashStore())),
        ("torch", lambda: TorchPlain(compiled, 0)),
        (TORCH_EAGER, lambda: TorchPlain(replace(eager, compiled=False), 0)),
        (ALL, lambda: Ours(keeps, 0, dist.HashStore())),
    ):
        _, found.first[side] = _cpu_seconds(partial(begin, side, make))
    for _ in range(CHECKED_STEPS - 1):
        for side in sides.values():
            side.step()
    for side in ("eager", "torch", TORCH_EAGER, ALL):
        check_same_training(sides["ours"], sides[side], TOLERANCE[precision])
    names = [*sides]
    for k in range(rounds):
        begins = k % len(names)
        for name in names[begins:] + names[:begins]:
            gc.collect()
            found.steps.setdefault(name, []).append(_cpu_seconds(sides[name].step)[1])
    for side in sides.values():
        side.close()
    return found


def _cpu_seconds(call: Callable[[], T]) -> tuple[T, float]:
    """Return the result of a call and its CPU seconds, child processes included."""

    def spent() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(u.ru_utime + u.ru_stime for u in used)

    begin = spent()
    result = call()
    return result, spent() - begin
