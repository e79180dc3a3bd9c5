"""Compare compiled steps with eager ones, and with plain torch, eager and under torch.compile, on one device.

python benchmarks/gpu_check.py --kernels      on a CUDA device; the sides run in turns in one process

Each side trains the same job: `m` microbatches forward and backward, then the job's optimizer. Piper's sides run
inline; their steps are planned and verified as any others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

import piper
from benchmarks import gpu
from benchmarks.measure import Row
from piper import models
from piper.models import DecoderConfig
from piper_runtime.rank import using

ROUNDS, STEPS, WARMUP = 5, 6, 3  # a run's period leaves out three steps, too

OURS = "ours, inductor"


@dataclass
class Side:
    """Hold one side: a function that runs some steps and returns the seconds of one."""

    name: str
    run: Callable[[], float]


def compared(
    device: str, sizes: Mapping[str, DecoderConfig], precision: str, global_batch: int, m: int
) -> Iterator[Row]:
    """Yield for each model the ratios of the sides' steps to the compiled plan's, compile seconds and the peak."""
    with using(device):
        for name, config in sizes.items():
            job = models.job(config, global_batch=global_batch, precision=precision)
            title = f"{precision}, {name}, m={m}"
            yield from _of_model(device, job, m, title)


def _of_model(device: str, job: piper.Job, m: int, title: str) -> Iterator[Row]:
    strategy = piper.Strategy(piper.Mesh(pp=1), (piper.split(piper.where(), microbatches=m),))
    plans = {
        kernels: piper.compile(
            job,
            strategy,
            options=piper.Options(kernels=kernels, device="cuda" if device == "cuda" else ""),
        )
        for kernels in ("eager", "inductor")
    }
    begin = time.perf_counter()
    measured = piper.execute(plans["inductor"], steps=2, launcher="processes")
    yield Row(
        "kernels", f"{title}: first two steps with compilation", time.perf_counter() - begin, "s"
    )
    planned, asked, note = gpu.peak_errors(plans["inductor"].plan, measured.peak_bytes)
    yield gpu.error_row(
        "kernels", f"{title}: peak memory, compiled", 100 * (planned / asked - 1), gpu.MEMORY, note
    )
    sides = [
        *(Side(f"ours, {kernels}", partial(_ours, plan)) for kernels, plan in plans.items()),
        Side("torch, eager", Plain(device, job, m, compiled=False).seconds),
        Side("torch.compile", Plain(device, job, m, compiled=True).seconds),
    ]
    taken: dict[str, list[float]] = {side.name: [] for side in sides}
    for _ in range(ROUNDS):
        for side in sides:
            taken[side.name].append(side.run())
    ours = taken[OURS]
    for side in (s for s in sides if s.name != OURS):
        ratios = sorted(a / b for a, b in zip(taken[side.name], ours, strict=True))
        note = (
            f"{1e3 * median(taken[side.name]):.2f} ms/step, compiled plan {1e3 * median(ours):.2f}"
        )
        yield Row(
            "kernels", f"{title}: {side.name} / {OURS}", median(ratios), "x", ratios[0], ratios[-1],
            note=note,
        )  # fmt: skip


def _ours(plan: piper.Compiled) -> float:
    run = piper.execute(plan, steps=WARMUP + STEPS, launcher="inline", memory=False)
    assert run.period_s is not None
    return run.period_s


class Plain:
    """Train a job in plain torch on one device: no part of Piper is in the loop."""

    def __init__(self, device: str, job: piper.Job, m: int, compiled: bool) -> None:
        self._device, self._m, self._job = torch.device(device), m, job
        torch.manual_seed(0)
        self._model = job.model().to(self._device, job.precision.dtype)
        self._optimizer = job.optimizer(list(self._model.named_parameters()))
        for group in self._optimizer.param_groups:
            group["fused"] = True
        self._loss = torch.compile(self._forward) if compiled else self._forward

    def _forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._job.loss(self._model(inputs), targets) / self._m

    def seconds(self) -> float:
        """Return the median seconds of a step."""
        seconds = []
        for step in range(WARMUP + STEPS):
            inputs, targets = self._job.batch(step, range(self._job.global_batch))
            inputs, targets = inputs.to(self._device), targets.to(self._device)
            self._wait()
            begin = time.perf_counter()
            for x, y in zip(inputs.chunk(self._m), targets.chunk(self._m), strict=True):
                self._loss(x, y).backward()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=False)
            self._wait()
            seconds.append(time.perf_counter() - begin)
        return median(seconds[WARMUP:])

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
