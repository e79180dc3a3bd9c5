"""Define torch's side of a comparison with shared states: FSDP2 alone, and FSDP2 under its 1F1B."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

from benchmarks.step_kinds import SHARDED
from benchmarks.step_model import GPT, Regime, Stage, batch, fused_adamw, loss


class TorchSharded:
    """Train with FSDP2 in its default setting: every layer by itself, dropped after forward and gathered again.

    `stages` of a pipeline run 1F1B; 1 is no pipeline.
    """

    def __init__(self, kind: str, regime: Regime, model: GPT, global_batch: int, rank: int) -> None:
        self.losses: list[float] = []
        stages = SHARDED[kind].stages
        mesh = init_device_mesh("cpu", (stages, 2), mesh_dim_names=("pp", "dp"))
        index, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        part: nn.Module = model if stages == 1 else Stage(model, index, stages)
        _shard(part, mesh["dp"])
        self._regime, self._size, self._index, self._stages, self._step = (
            regime,
            global_batch,
            index,
            stages,
            0,
        )
        self._rows = range(replica * global_batch // 2, (replica + 1) * global_batch // 2)
        self._model, self._optimizer = part, fused_adamw(part)
        self._schedule: Any = None
        if stages > 1:
            stage = PipelineStage(
                part, index, stages, torch.device("cpu"), group=mesh["pp"].get_group()
            )
            self._schedule = Schedule1F1B(stage, regime.microbatches, loss_fn=loss)

    def step(self) -> None:
        inputs, targets = batch(self._regime.context, self._size, self._step, self._rows)
        if self._schedule is None:
            value = loss(self._model(inputs), targets)
            value.backward()
            self.losses.append(value.item())
        else:
            found: list[torch.Tensor] = []
            last = self._index == self._stages - 1
            given: dict[str, Any] = dict(target=targets, losses=found) if last else {}
            self._schedule.step(*[inputs] * (self._index == 0), **given, return_outputs=False)
            if found:
                self.losses.append(torch.stack(found).mean().item())
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._step += 1

    def state_bytes(self) -> int:
        """Return the bytes that this rank keeps between steps."""
        states = [
            t
            for state in self._optimizer.state.values()
            for t in state.values()
            if isinstance(t, torch.Tensor)
        ]
        return sum(_nbytes(t) for t in [*self._model.parameters(), *states])

    def close(self) -> None:
        """Nothing to end."""


def _shard(part: Any, mesh: DeviceMesh) -> None:
    layers: Iterable[nn.Module] = part.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(part, mesh=mesh, reshard_after_forward=True)


def _nbytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def most_allocated(step: Any) -> int:
    """Return the most bytes that a step holds on the CPU above those before it, as torch's profiler sees
    allocations."""
    dist.barrier()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    changes = [
        (e.start_ns(), e.nbytes())
        for e in profiler.profiler.kineto_results.events()
        if e.name() == "[memory]"
    ]
    held = most = 0
    for _, nbytes in sorted(changes, key=lambda change: change[0]):
        held += nbytes
        most = max(most, held)
    return most
