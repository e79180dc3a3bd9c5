"""Hold everything that a rank's closures use: its part of the plan, tensors, feed, optimizer, and results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from piper_ir.ground.errors import NonFiniteLossError
from piper_ir.ground.expert_tokens import counts_tokens
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import Category, Plan
from piper_ir.program.ops import Collective, Fresh, Update
from piper_ops import ROUNDS, Key, key_of
from piper_runtime.rank.batches.feed import Feed
from piper_runtime.rank.binding.dropped_rows import DroppedRows
from piper_runtime.rank.binding.step_collectives import Exchange, Post, no_exchange, post_late
from piper_runtime.rank.job.job import Batch, NamedParameters
from piper_runtime.rank.job.loss_scale import LossScale, RunningScale
from piper_runtime.rank.optimizers.optimizer import RankOptimizer, scaled
from piper_runtime.rank.values.code import ExportedCode, LoadedSteps
from piper_runtime.rank.values.device import CPU, NumberReader, numbers_of
from piper_runtime.rank.values.host import HostMemory
from piper_runtime.rank.values.layouts import own_parts
from piper_runtime.rank.values.rng import Draws
from piper_runtime.rank.values.step_inputs import StepInputs
from piper_runtime.rank.values.store import Store


def not_finite_advice(clip: float | None) -> str:
    """Return the advice for a number that is not finite, given the norm to which gradients are clipped, or None."""
    if clip is None:
        ways = "check the batch and the learning rate, clip gradients (Job.clip_norm)"
    else:
        ways = (
            f"gradients are clipped already (Job(clip_norm={clip:g})), which helps against large ones only: check "
            f"the batch, the learning rate, and operations without a value there (log(0), 0 / 0, a row with all "
            f"positions masked)"
        )
    return f"{ways}, or see whether it is finite in float64 (`piper verify FILE.py`)"


Probe = Callable[["RankState", tuple[str, ...], "float | torch.Tensor"], None]
"""A function called in Update before the optimizer's step with the rank, the buckets and the gradients' scale."""


class _Places(dict[str, int]):
    """Map axes to a rank's places along them."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        super().__init__()
        self._mesh, self._rank = mesh, rank

    def __missing__(self, axis: str) -> int:
        place = self[axis] = self._mesh.index_along(self._mesh.along(axis), self._rank)
        return place


def _nothing() -> None:
    pass


def _of_replica_0(plan: Plan) -> set[str]:
    """Return the buffers that differ between replicas, since forward updates them from the batch."""
    outputs = [o for chunk in plan.chunks for o in chunk.outputs if o.kind == "buffer" and o.varies]
    return {o.ref for o in outputs if not counts_tokens(o.ref)}


@dataclass(frozen=True)
class RankJob:
    """Hold the parts of a job that a rank needs.

    They are the callables that run on it, the seed of random operations, the first step of the run, the way of drawing
    random numbers, and how the loss is scaled (None: it is not). `progress` is called while the rank compiles.
    """

    batch: Batch
    optimizer: Callable[[NamedParameters], Any]
    scheduler: Callable[[torch.optim.Optimizer], Any] | None
    seed: int
    first_step: int = 0
    draws: Draws = "rows"
    loss_scale: LossScale | None = None
    progress: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class PlaceInBucket:
    """Hold the place of a parameter in the flat tensor of its bucket: its shape, strides, and first element."""

    bucket: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class RankState:
    """Hold one rank of a plan with its states, before its program is bound.

    `exchange` is set by the engine that runs the rank; `counts` says that the rank is the first of the ranks that share
    its chunks, so that its losses count. An Update calls `before_update` before it writes parameters and optimizer
    state. If the plan's steps are CUDA graphs, `inputs` hold the rows and numbers that the host gives a step.
    """

    def __init__(
        self, plan: Plan, rank: int, code: ExportedCode, job: RankJob,
        params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], probe: Probe | None = None,
        device: torch.device = CPU, numbers: NumberReader | None = None,
    ):  # fmt: skip
        self.plan = plan
        self.rank = rank
        self.device = device
        self.numbers = numbers or numbers_of(device)
        self.host = HostMemory(device)
        self.inputs = StepInputs(device) if plan.cuda_graph else None
        self.step_key = self._key if plan.cuda_graph else None
        self.role = plan.role_of(rank)
        self.seed = job.seed
        self.draws = job.draws
        self.probe = probe
        self.step = 0
        self.scalars: dict[str, dict[int, float]] = {"loss": {}, "weight": {}}
        self.buffer_mb: dict[str, int] = {}
        self.counted: dict[str, torch.Tensor] = {}
        self.expert_tokens: dict[str, list[int]] = {}
        self.gradient_norm: float | None = None
        self.loss_scale = RunningScale(job.loss_scale) if job.loss_scale else None
        self.untracked: Callable[[], AbstractContextManager[None]] = nullcontext
        self.dropped = DroppedRows(plan, self.numbers, lambda: self.untracked())
        self.before_update: Callable[[], None] = _nothing
        with torch.no_grad():
            self.store, self.optimizer = self._states(job, params, buffers)
        self.feed = Feed(plan, rank, job.batch, device, partial(LoadedSteps(code), step="F"))
        self.counts = not plan.mesh.index_along(plan.shared, rank)
        self.exchange: Exchange = no_exchange
        self.post: Post = post_late(lambda *given: self.exchange(*given))
        self.progress = job.progress
        self.steps = LoadedSteps(code, device, self._globals(), self.dropped.kernels, job.progress)

    def _states(
        self, job: RankJob, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> tuple[Store, RankOptimizer]:
        """Return the rank's tensors and its optimizer, made of the initial ones."""
        store = Store(
            self.plan,
            self.rank,
            own_parts(self.plan, self.rank, params),
            buffers,
            self.device,
            self.host,
        )
        return store, RankOptimizer(self.plan, store, job.optimizer, job.scheduler, job.first_step)

    def _globals(self) -> dict[str, Any]:
        """Return the globals of generated code that differ between the devices that share a chunk."""
        return {
            "PLACE": _Places(self.plan.mesh, self.rank),
            "EXCHANGE": lambda *given: self.exchange(*given),
            "POST": lambda *given: self.post(*given),
            "ROUNDS": {op._schema.name: function for op, function in ROUNDS.items()},
        }

    def _key(self, place: str) -> Key:
        """Return the key of a place's random numbers in the present step, where a CUDA graph reads it."""
        assert self.inputs is not None
        with self.untracked():
            return self.inputs.key(place, lambda: key_of(f"{self.seed}/{self.step}/{place}"))

    def record(self, kind: str, mb: int, value: float) -> None:
        """Keep a microbatch's loss, weight or metric; raise NonFiniteLossError when a loss or weight is not finite."""
        if kind in ("loss", "weight") and not math.isfinite(value):
            ops = [p.op for role in self.plan.roles for instr in role.program for p in instr.parts]
            clip = next((op.clip for op in ops if isinstance(op, Update)), None)
            raise NonFiniteLossError(
                f"the {kind} is {value} in step {self.step} on rank {self.rank}, microbatch {mb}; "
                f"{not_finite_advice(clip)}"
            )
        if self.counts:
            self.scalars.setdefault(kind, {})[mb] = value

    @property
    def scale_state(self) -> dict[str, float]:
        """Return what a checkpoint holds of the scale of the loss; nothing if it is not scaled."""
        return self.loss_scale.state() if self.loss_scale else {}

    def count(self, buffer: str, tokens: torch.Tensor) -> None:
        """Add a microbatch's counts of tokens per expert to the counts of the step."""
        counts = self.store.buffers[buffer]
        if buffer in self.counted:
            counts.add_(tokens)
        else:
            self.counted[buffer] = counts.copy_(tokens)

    def end_counts(self) -> None:
        """Read the tokens of experts when the step is over, all at once.

        Only the first of the ranks that share chunks counts.
        """
        if not self.counts:
            return
        self.expert_tokens = self.dropped.counts()
        if self.counted:
            with self.untracked():
                numbers = torch.stack([*self.counted.values()]).tolist() if self._alike() else None
                each = numbers or [t.tolist() for t in self.counted.values()]
            self.expert_tokens |= zip(self.counted, each, strict=True)

    def _alike(self) -> bool:
        return len({t.shape for t in self.counted.values()}) == 1

    @cached_property
    def stands_for(self) -> dict[str, tuple[Category, str]]:
        """Return the category and bucket of each value that stands for a state which ranks share."""
        state_of: dict[str, tuple[Category, str]] = {}
        for instr in self.role.program:
            for part in instr.parts:
                if isinstance(part.op, Fresh | Collective) and part.op.bucket:
                    category: Category = "reduced" if isinstance(part.op, Fresh) else "gathered"
                    state_of |= {v: (category, part.op.bucket) for v in part.writes}
        return state_of

    @cached_property
    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that parameters have on this rank."""
        return {p.name: tuple(bind(d, 0) for d in p.spec.shape) for p in self.plan.params}

    @cached_property
    def place_of(self) -> dict[str, PlaceInBucket]:
        """Return the place of each parameter in its bucket."""
        specs = self.own_shapes
        return {
            name: PlaceInBucket(
                b.id, specs[name], torch.empty(specs[name], device="meta").stride(), offset
            )
            for b in self.store.buckets
            for name, offset in zip(b.params, b.offsets, strict=True)
        }

    def states(self) -> dict[str, torch.Tensor]:
        """Return copies of the parameters and buffers that this rank holds whole, by name, on the CPU.

        Trained parameters are as the optimizer has them. A frozen one is left out if the rank holds it in a narrower
        dtype only: the job has it as it was made, or another rank as it was saved. So are buffers that are updated from
        the batch, except in the first replica, whose copies count.
        """
        dtypes = {getattr(torch, b.dtype) for b in self.plan.buckets}
        bucketed = {name for bucket in self.store.buckets for name in bucket.params}
        lone = {n: t for n, t in self.store.params.items() if n not in bucketed}
        whole = {
            n: t
            for n, t in lone.items()
            if not dtypes or t.dtype in dtypes or not t.is_floating_point()
        }
        others = _of_replica_0(self.plan) if self.plan.replica_of(self.rank) else ()
        buffers = {n: t for n, t in self.store.buffers.items() if n not in others}
        tensors = {**whole, **self.store.exact, **self.store.masters, **buffers}
        return {n: t.to(CPU, copy=True) for n, t in tensors.items()}

    def shared_states(self) -> dict[str, torch.Tensor]:
        """Return copies of this rank's shards of the parameters that ranks share, by bucket, on the CPU."""
        return {
            b.id: self.store.own_masters[b.id].to(CPU, copy=True)
            for b in self.store.buckets
            if b.shard.optim
        }

    def gradients(
        self, buckets: tuple[str, ...], scale: float | torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return copies of the gradients in whole buckets as the optimizer gets them, by parameter, on the CPU."""
        names = [n for b in map(self.plan.bucket, buckets) if not b.shard.optim for n in b.params]
        return {
            n: scaled(self.store.grads[n].clone(), scale, self.store.masters[n].dtype).to(CPU)
            for n in names
        }

    def shared_gradients(
        self, buckets: tuple[str, ...], scale: float | torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return copies of this rank's shards of the gradients, by bucket, for the given buckets that ranks share."""
        shared = [b for b in buckets if self.plan.bucket(b).shard.optim]
        own, masters = self.store.own_grads, self.store.own_masters
        return {b: scaled(own[b].clone(), scale, masters[b].dtype).to(CPU) for b in shared}
