"""Define torch's side of a comparison of tensor parallelism: `parallelize_module`, as its documents write it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks.step_model import Regime, batch
from benchmarks.tensor_model import TENSOR, Kind, initial, loss


class TorchTensor:
    """Train with ColwiseParallel and RowwiseParallel, and with SequenceParallel where the kind says so.

    Each part gathers its input once for all of its projections, so that their gradients take one message too.
    """

    def __init__(self, name: str, regime: Regime, seed: int, global_batch: int, rank: int) -> None:
        self.losses: list[float] = []
        self._counts = rank == 0  # both ranks compute the same loss
        self._regime, self._size, self._step = regime, global_batch, 0
        self._model = initial(name, regime, seed)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize_module(self._model, mesh, _plan(TENSOR[name], regime.layers))
        self._optimizer = _adamw(self._model)

    def step(self) -> None:
        inputs, targets = batch(self._regime.context, self._size, self._step, range(self._size))
        found = loss(self._model(inputs), targets)
        found.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses += [found.item()] if self._counts else []
        self._step += 1

    def close(self) -> None:
        """Nothing to end."""


def _plan(kind: Kind, layers: int) -> dict[str, ParallelStyle]:
    stream = Shard(1) if kind.sequence else Replicate()
    plan: dict[str, ParallelStyle] = {}
    for k in range(layers):
        for part in ("attention", "feed_forward"):
            plan[f"layers.{k}.{part}"] = PrepareModuleInput(
                input_layouts=stream, desired_input_layouts=Replicate()
            )
        plan |= {f"layers.{k}.{name}": ColwiseParallel() for name in kind.columns}
        plan |= {f"layers.{k}.{name}": RowwiseParallel(output_layouts=stream) for name in kind.rows}
        if kind.sequence:
            plan |= {f"layers.{k}.{norm}": SequenceParallel() for norm in ("norm1", "norm2")}
    if kind.sequence:
        plan["embedded"] = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=stream
        )
        plan["norm"] = SequenceParallel()
        plan["head"] = PrepareModuleInput(
            input_layouts=stream, desired_input_layouts=Replicate(), use_local_output=True
        )
    return plan


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make the fused optimizer, whose kernels do not take DTensors and other tensors in one call."""
    apart: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        apart[isinstance(parameter, DTensor)].append(parameter)
    return torch.optim.AdamW([{"params": found} for found in apart.values()], lr=1e-4, fused=True)
