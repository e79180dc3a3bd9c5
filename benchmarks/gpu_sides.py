"""Define the two sides of the comparison on one CUDA device: a plan in Piper's engine, and a loop in torch alone.

Both train the GPT of `benchmarks.step_model` on the same batches, with microbatches whose gradients are summed, and
torch's fused AdamW. Parameters, activations and gradients have one dtype.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

import piper
from benchmarks.step_model import GPT, Regime, batch, fused_adamw, job, loss
from piper_ir.plan.plan import Plan
from piper_runtime.engine import HEART_SLOTS, CudaApi, CudaStreams, Engine, MemoryRecord
from piper_runtime.launch import measured_counter, rank_job
from piper_runtime.rank import BoundComm, Rank, Thunk, materialize, upload


@dataclass(frozen=True)
class Setup:
    """Hold one comparison: sizes, dtype by torch's name, and the plan for one device with its code."""

    regime: Regime
    precision: str
    work: piper.Job
    strategy: piper.Strategy
    compiled: piper.Compiled

    @property
    def plan(self) -> Plan:
        return self.compiled.plan


def prepared(regime: Regime, precision: str) -> Setup:
    """Return the comparison, compiled as a user would: one device, `regime.microbatches` microbatches."""
    work = replace(
        job(regime, regime.rows * regime.microbatches), precision=piper.Precision(params=precision)
    )
    strategy = piper.Strategy(
        piper.Mesh(pp=1), (piper.split(piper.where(), microbatches=regime.microbatches),)
    )
    return Setup(regime, precision, work, strategy, piper.compile(work, strategy))


class Side(Protocol):
    """Say what a way to train offers.

    Per step: `losses`, the mean over microbatches; `issued_s`, seconds until the host had issued all.
    """

    losses: list[float]
    issued_s: list[float]

    def step(self) -> None:
        """One optimizer step; when it returns the device is done with it."""
        ...


class Ours:
    """Run the plan in the engine, bound as `piper_runtime.launch.worker.worker` binds it."""

    def __init__(self, setup: Setup, device: torch.device) -> None:
        self.losses: list[float] = []
        self.issued_s: list[float] = []
        plan, code = setup.plan, setup.compiled.code
        assert code is not None
        initial = materialize(setup.work)
        codes = code.export([c.code for c in plan.chunks], plan.rows)
        self.bound = Rank(
            plan, 0, codes, rank_job(setup.work), initial.params, initial.buffers, None, device
        )
        self._engine = engine_of(self.bound, device, self._mark)
        self._begin = 0.0

    def _mark(self) -> None:
        self.issued_s.append(time.perf_counter() - self._begin)

    def step(self) -> None:
        self._begin = time.perf_counter()
        self._engine.step(len(self.losses))
        self._keep()

    def counted(self) -> MemoryRecord:
        """One more step, with what the allocator was asked for."""
        counter = measured_counter(self.bound, alone=True)
        self._engine.step(len(self.losses), counter=counter)
        self._keep()
        return counter.record()

    def _keep(self) -> None:
        found, weights = (self.bound.scalars[kind].values() for kind in ("loss", "weight"))
        self.losses.append(sum(found) / (sum(weights) or len(found)))


def engine_of(bound: Rank, device: torch.device, issued: Callable[[], None]) -> Engine:
    """Return the engine of a rank that talks to nobody; `issued` is called when the host has issued a step."""
    heart: Any = array("q", [0] * HEART_SLOTS)
    streams = _Watched(bound.entries, bound.role.streams, heart, CudaApi(device))
    streams.issued = issued
    return Engine(bound, streams, _nobody, heart)


class _Watched(CudaStreams):
    issued: Callable[[], None]

    def synchronize(self) -> None:
        self.issued()
        super().synchronize()


def _nobody(comm: BoundComm) -> Thunk:
    raise AssertionError("a plan for one device does not communicate")


class Torch:
    """Train with plain torch.

    Forward and backward of each microbatch run under autograd, batches come through pinned memory; there is one
    optimizer step, and one look at the losses when it is over.
    """

    def __init__(self, setup: Setup, device: torch.device) -> None:
        self.losses: list[float] = []
        self.issued_s: list[float] = []
        self._regime, self._device = setup.regime, device
        torch.manual_seed(setup.work.seed)
        self.model = GPT(setup.regime).to(setup.work.precision.dtype).to(device)
        self._optimizer = fused_adamw(self.model)

    def step(self) -> None:
        r, found, begin = self._regime, list[torch.Tensor](), time.perf_counter()
        for mb in range(r.microbatches):
            rows = range(mb * r.rows, (mb + 1) * r.rows)
            inputs, targets = (
                upload(t, tuple(t.shape), t.dtype, self._device)
                for t in batch(r.context, r.rows * r.microbatches, len(self.losses), rows)
            )
            one = loss(self.model(inputs), targets)
            (one / r.microbatches).backward()
            found.append(one.detach())
        self._optimizer.step()
        self._optimizer.zero_grad()
        mean = torch.stack(found).double().mean()
        self.issued_s.append(time.perf_counter() - begin)
        self.losses.append(mean.item())
