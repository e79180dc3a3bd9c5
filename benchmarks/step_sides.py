"""Define a comparison with torch.distributed, and its sides on one rank: torch's pipelines and replicas, and our plan."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.nn.parallel import DistributedDataParallel

import piper
from benchmarks.step_model import Regime, Stage, fused_adamw
from piper.api.compiling.compiling import Compiled
from piper_ir.plan.plan import Plan
from piper_runtime.engine import HEART_SLOTS, CpuStreams, Engine, host_clock
from piper_runtime.launch import rank_job
from piper_runtime.rank import Rank, ShippedCode, materialize
from piper_runtime.transport import GlooCommunicators

WORLD = 2
DATA_PARALLEL = "DDP"
PLAIN = "torch.compile"
"""The kind of comparison with the whole model and its loss under torch.compile, on one device."""


@dataclass(frozen=True)
class Pipeline:
    """Hold one schedule over two ranks on both sides.

    `chunks` are stages per rank; `vee` says that they go over the ranks and back, rather than round and round.
    """

    recipe: Callable[..., tuple[Any, ...]]
    torchs: type[PipelineScheduleSingle] | type[PipelineScheduleMulti]
    chunks: int = 1
    vee: bool = False

    @property
    def stages(self) -> int:
        return WORLD * self.chunks

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, ascending, as torch's schedule expects them and the recipe places them."""
        return [
            k * WORLD + (WORLD - 1 - rank if self.vee and k % 2 else rank)
            for k in range(self.chunks)
        ]


_recipes = piper.recipes
PIPELINES = {
    "GPipe": Pipeline(_recipes.gpipe, ScheduleGPipe),
    "1F1B": Pipeline(_recipes.one_f_one_b, Schedule1F1B),
    "interleaved 1F1B": Pipeline(_recipes.interleaved, ScheduleInterleaved1F1B, 2),
    "interleaved zero bubble": Pipeline(_recipes.interleaved_zb, ScheduleInterleavedZeroBubble, 2),
    "ZBV": Pipeline(_recipes.zbv, ScheduleZBVZeroBubble, 2, vee=True),
    "DualPipeV": Pipeline(_recipes.dualpipe_v, ScheduleDualPipeV, 2, vee=True),
}


@dataclass(frozen=True)
class Setup:
    """Hold one comparison: the same model, data and optimizer on both sides, and our plan with its code.

    `kind` names torch's side, see `step_worker.SIDES`. With `compiled`, torch's side compiles its stages, or each of its
    blocks, and ours has kernels of Inductor. `tolerance` is the relative difference that losses of the first
    steps may have: sums in another order differ by far less, another model or batch by more.
    """

    kind: str
    regime: Regime
    job: piper.Job
    plan: Plan
    code: Mapping[str, Mapping[str, ShippedCode]]
    tolerance: float = 1e-4
    compiled: bool = False

    def rows_of(self, replica: int) -> range:
        """Return the rows of one of two replicas."""
        size = self.plan.global_batch // 2
        return range(replica * size, (replica + 1) * size)


def shipped_code(compiled: Compiled) -> Mapping[str, Mapping[str, ShippedCode]]:
    """Return the code of a plan, as workers get it."""
    assert compiled.code is not None
    code = compiled.code.export(compiled.plan.codes, compiled.plan.rows)
    return {
        name: {step: ShippedCode(c.source, dict(c.constants)) for step, c in steps.items()}
        for name, steps in code.items()
    }


def initial_model(setup: Setup) -> Any:
    """Return the model as the job makes it, with compiled blocks where blocks are what torch's side compiles."""
    torch.manual_seed(setup.job.seed)
    model: Any = setup.job.model().to(setup.job.precision.dtype)
    if setup.compiled and setup.kind not in (*PIPELINES, PLAIN):
        for layer in model.layers:
            layer.compile()
    return model


class Side(Protocol):
    """Say what a way to train offers; `losses` are those of each step on this rank, empty where it computes none."""

    losses: list[float]

    def step(self) -> None: ...
    def close(self) -> None: ...


class TorchSide:
    """Train a module with torch on some rows of each batch; subclasses make the module parallel."""

    def __init__(
        self, setup: Setup, module: nn.Module, optimizer: torch.optim.Optimizer, rows: range
    ) -> None:
        self.losses: list[float] = []
        self.module, self.optimizer = module, optimizer
        self._job, self._rows, self._step = setup.job, rows, 0

    def step(self) -> None:
        self.losses += self.backward(*self._job.batch(self._step, self._rows))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._step += 1

    def backward(self, inputs: Any, targets: Any) -> list[float]:
        """Make the gradients of a step; return its loss, or nothing where this rank has none."""
        value = self._job.loss(self.module(inputs), targets)
        value.backward()
        return [value.item()]

    def close(self) -> None:
        """Nothing to end."""


class TorchData(TorchSide):
    """Train with DistributedDataParallel in its fastest setting.

    It has its default buckets (25 MiB, the first 1 MiB), and gradients as views of them.
    """

    def __init__(self, setup: Setup, rank: int) -> None:
        module = DistributedDataParallel(initial_model(setup), gradient_as_bucket_view=True)
        super().__init__(setup, module, fused_adamw(module), setup.rows_of(rank))


class TorchPlain(TorchSide):
    """Train the whole model under torch.compile, with its loss in the same graph, or without `compiled` eagerly."""

    def __init__(self, setup: Setup, rank: int) -> None:
        module, self._m = initial_model(setup), setup.plan.microbatches
        super().__init__(setup, module, fused_adamw(module), range(setup.plan.global_batch))
        loss = lambda x, y: setup.job.loss(module(x), y) / self._m  # noqa: E731 - one line, compiled or not
        self._loss = torch.compile(loss) if setup.compiled else loss

    def backward(self, inputs: Any, targets: Any) -> list[float]:
        losses = []
        for x, y in zip(inputs.chunk(self._m), targets.chunk(self._m), strict=True):
            value = self._loss(x, y)
            value.backward()
            losses.append(value.item())
        return [sum(losses)]


class TorchStages(TorchSide):
    """Train stages of this rank under one of torch's schedules, with its defaults.

    One default is changed: the outputs of the last stage are not kept, which costs it a copy and which training has no
    use for.
    """

    def __init__(
        self,
        setup: Setup,
        pipeline: Pipeline,
        modules: Mapping[int, nn.Module],
        rows: range,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        every = nn.ModuleList(modules.values())
        super().__init__(setup, every, fused_adamw(every), rows)
        device = torch.device("cpu")
        stages = [
            PipelineStage(m, i, pipeline.stages, device, group=group) for i, m in modules.items()
        ]
        several = issubclass(pipeline.torchs, PipelineScheduleMulti)
        self._schedule: Any = pipeline.torchs(
            stages if several else stages[0],  # type: ignore[arg-type]  # as the class wants them
            setup.regime.microbatches,
            loss_fn=setup.job.loss,
        )
        self._first, self._last = 0 in modules, pipeline.stages - 1 in modules

    def backward(self, inputs: Any, targets: Any) -> list[float]:
        losses: list[Tensor] = []
        keywords: dict[str, Any] = dict(target=targets, losses=losses) if self._last else {}
        self._schedule.step(*[inputs] * self._first, **keywords, return_outputs=False)
        return [torch.stack(losses).mean().item()] if losses else []


class TorchPipeline(TorchStages):
    """Train with torch.distributed.pipelining."""

    def __init__(self, setup: Setup, rank: int) -> None:
        pipeline, model = PIPELINES[setup.kind], initial_model(setup)
        modules = {i: Stage(model, i, pipeline.stages) for i in pipeline.stages_of(rank)}
        if setup.compiled:
            for module in modules.values():
                module.compile()
        super().__init__(setup, pipeline, modules, range(setup.plan.global_batch))


class Ours:
    """Run a plan on one rank, bound as `piper_runtime.launch.worker.worker` binds it."""

    def __init__(self, setup: Setup, rank: int, store: dist.Store) -> None:
        self.losses: list[float] = []
        initial = materialize(setup.job)
        self._bound = Rank(
            setup.plan, rank, setup.code, rank_job(setup.job), initial.params, initial.buffers
        )
        communicators = GlooCommunicators(dist.PrefixStore("ours", store), rank)
        communicators.connect(setup.plan)
        heart: Any = array("q", [0] * HEART_SLOTS)
        self._streams = CpuStreams(setup.plan.role_of(rank).streams, heart)
        self._engine = Engine(self._bound, self._streams, communicators.bind, heart, host_clock)
        self._step = 0

    def step(self) -> None:
        self._engine.step(self._step)
        if losses := self._bound.scalars["loss"]:
            weight = sum(self._bound.scalars["weight"].values()) or len(losses)
            self.losses.append(sum(losses.values()) / weight)
        self._step += 1

    def state_bytes(self) -> int:
        """Return the bytes that this rank keeps between steps."""
        return sum(state.nbytes for state in self._bound.role.states)

    def close(self) -> None:
        self._streams.close()
