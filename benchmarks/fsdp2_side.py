"""Define torch's side of a comparison with shared states: FSDP2 alone, and FSDP2 under its 1F1B."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.step_model import Stage, fused_adamw
from benchmarks.step_sides import PIPELINES, Setup, TorchSide, TorchStages, initial_model

SHARDED = {"FSDP2": 1, "FSDP2, 1F1B": 2}
"""The stages of each comparison with FSDP2, whose two replicas share all states."""


class TorchSharded(TorchStages):
    """Train with FSDP2 in its default setting: every layer by itself, dropped after forward and gathered again.

    Stages run 1F1B; a single one is trained without a schedule.
    """

    def __init__(self, setup: Setup, rank: int) -> None:
        stages, model = SHARDED[setup.kind], initial_model(setup)
        mesh = init_device_mesh("cpu", (stages, 2), mesh_dim_names=("pp", "dp"))
        index, rows = mesh["pp"].get_local_rank(), setup.rows_of(mesh["dp"].get_local_rank())
        part = model if stages == 1 else Stage(model, index, stages)
        for module in (*part.layers, part):
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=True)
        self._staged = stages > 1
        if self._staged:
            group = mesh["pp"].get_group()
            super().__init__(setup, PIPELINES["1F1B"], {index: part}, rows, group)
        else:
            TorchSide.__init__(self, setup, part, fused_adamw(part), rows)

    def backward(self, inputs: Any, targets: Any) -> list[float]:
        way = TorchStages if self._staged else TorchSide
        return way.backward(self, inputs, targets)

    def state_bytes(self) -> int:
        """Return the bytes that this rank keeps between steps."""
        states = [
            t
            for state in self.optimizer.state.values()
            for t in state.values()
            if isinstance(t, torch.Tensor)
        ]
        return sum(_nbytes(t) for t in [*self.module.parameters(), *states])


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
