"""Define the two sides of a comparison on one rank: torch.distributed's own parallelism, and a plan in our engine."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

import piper
from benchmarks.expert_model import MixtureRegime, expert_job
from benchmarks.expert_side import TorchMixture
from benchmarks.fsdp2_side import TorchSharded
from benchmarks.step_kinds import PIPELINES, SHARDED, WORLD
from benchmarks.step_model import GPT, Regime, Stage, batch, fused_adamw, job, loss
from benchmarks.tensor_model import TENSOR, tensor_job
from benchmarks.tensor_side import TorchTensor
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Compute
from piper_runtime.engine import HEART_SLOTS, CpuStreams, Engine, host_clock
from piper_runtime.launch import rank_job
from piper_runtime.rank import Rank, ShippedCode, materialize
from piper_runtime.transport import GlooCommunicators


@dataclass(frozen=True)
class Setup:
    """Hold one comparison: the same model, data and optimizer on both sides, and our plan with its code.

    `kind`: see `step_kinds.KINDS`, `SHARDED`, `tensor_model.TENSOR` and `expert_model.EXPERTS`. `tolerance` is the
    relative difference that losses of the first steps may have: sums in another order differ by far less, another model
    or batch by more.
    """

    kind: str
    regime: Regime
    plan: Plan
    code: Mapping[str, Mapping[str, ShippedCode]]
    tolerance: float = 1e-4

    @property
    def job(self) -> piper.Job:
        """Return what both sides train."""
        if isinstance(self.regime, MixtureRegime):
            return expert_job(self.regime, self.global_batch)
        if self.kind in TENSOR:
            return tensor_job(self.kind, self.regime, self.global_batch)
        return job(self.regime, self.global_batch)

    @property
    def global_batch(self) -> int:
        return self.plan.global_batch


class Side(Protocol):
    """Say what a way to train offers; `losses` are those of each step on this rank, empty where it computes none."""

    losses: list[float]

    def step(self) -> None: ...
    def close(self) -> None: ...


class TorchPipeline:
    """Train with torch.distributed.pipelining and its defaults.

    One default is changed: the outputs of the last stage are not kept, which costs it a copy and which training has no
    use for.
    """

    def __init__(self, setup: Setup, rank: int) -> None:
        self.losses: list[float] = []
        self._setup, self._step = setup, 0
        pipeline = PIPELINES[setup.kind]
        model, indices = initial_model(setup), pipeline.stages_of(rank)
        modules = [Stage(model, index, pipeline.stages) for index in indices]
        device = torch.device("cpu")
        stages = [
            PipelineStage(m, i, pipeline.stages, device)
            for m, i in zip(modules, indices, strict=True)
        ]
        self._schedule = pipeline.schedule(stages, setup.regime.microbatches, loss)
        self._optimizer = fused_adamw(nn.ModuleList(modules))
        self._first, self._last = 0 in indices, pipeline.stages - 1 in indices

    def step(self) -> None:
        size = self._setup.global_batch
        inputs, targets = batch(self._setup.regime.context, size, self._step, range(size))
        found: list[torch.Tensor] = []
        given: dict[str, Any] = dict(target=targets, losses=found) if self._last else {}
        self._schedule.step(*[inputs] * self._first, **given, return_outputs=False)
        if found:
            self.losses.append(torch.stack(found).mean().item())
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._step += 1

    def close(self) -> None:
        """Nothing to end."""


class TorchData:
    """Train with DistributedDataParallel in its fastest setting.

    It has its default buckets (25 MiB, the first 1 MiB), and gradients as views of them.
    """

    def __init__(self, setup: Setup, rank: int) -> None:
        self.losses: list[float] = []
        self._setup, self._step = setup, 0
        self._model = DistributedDataParallel(initial_model(setup), gradient_as_bucket_view=True)
        self._optimizer = fused_adamw(self._model)
        rows = setup.global_batch // WORLD
        self._rows = range(rank * rows, (rank + 1) * rows)

    def step(self) -> None:
        inputs, targets = batch(
            self._setup.regime.context, self._setup.global_batch, self._step, self._rows
        )
        found = loss(self._model(inputs), targets)
        found.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(found.item())
        self._step += 1

    def close(self) -> None:
        """Nothing to end."""


class Ours:
    """Run a plan on one rank, bound as `piper_runtime.launch.worker.worker` binds it."""

    def __init__(self, setup: Setup, rank: int, store: dist.Store) -> None:
        self.losses: list[float] = []
        work = setup.job
        initial = materialize(work)
        self._bound = Rank(
            setup.plan, rank, setup.code, rank_job(work), initial.params, initial.buffers
        )
        communicators = GlooCommunicators(dist.PrefixStore("ours", store), rank)
        communicators.connect(setup.plan)
        heart: Any = array("q", [0] * HEART_SLOTS)
        self._streams = CpuStreams(setup.plan.role_of(rank).streams, heart)
        self._engine = Engine(self._bound, self._streams, communicators.bind, heart, host_clock)
        self._step = 0

    def step(self) -> None:
        self._run(traced=False)

    def _run(self, traced: bool) -> None:
        self._engine.step(self._step, traced=traced)
        if found := self._bound.scalars["loss"]:
            self.losses.append(
                sum(found.values()) / (sum(self._bound.scalars["weight"].values()) or len(found))
            )
        self._step += 1

    def forward_s(self) -> list[float]:
        """Seconds of each forward instruction of one more step."""
        self._run(traced=True)
        ops = [[p.op for p in instr.parts] for instr in self._bound.role.program]
        forward = {
            i
            for i, found in enumerate(ops)
            if any(isinstance(op, Compute) and op.step == "F" for op in found)
        }
        return [end - start for i, start, end in self._engine.spans if i in forward]

    def state_bytes(self) -> int:
        """Return the bytes that this rank keeps between steps."""
        return sum(state.nbytes for state in self._bound.role.states)

    def close(self) -> None:
        self._streams.close()


def initial_model(setup: Setup) -> GPT:
    """Return the model as the job makes it."""
    work = job(setup.regime, setup.global_batch)
    torch.manual_seed(work.seed)
    return GPT(setup.regime)


def theirs(setup: Setup, rank: int) -> Side:
    """Return torch's side of a comparison."""
    if isinstance(setup.regime, MixtureRegime):
        return TorchMixture(setup.regime, setup.job.seed, setup.global_batch, rank)
    if setup.kind in SHARDED:
        return TorchSharded(
            setup.kind, setup.regime, initial_model(setup), setup.global_batch, rank
        )
    if setup.kind in TENSOR:
        return TorchTensor(setup.kind, setup.regime, setup.job.seed, setup.global_batch, rank)
    return TorchPipeline(setup, rank) if setup.kind in PIPELINES else TorchData(setup, rank)
