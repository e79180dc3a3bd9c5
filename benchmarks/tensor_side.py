"""Compare tensor and sequence parallelism: a GPT and a Llama, and torch's side, `parallelize_module` as documented.

No projection here has a number of heads written into it that torch's `parallelize_module` would have to change: a part
takes as many heads as its weights give it. The vocabulary is odd, so that neither side shares embedding and head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
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
from torch.nn import functional as F

import piper
from benchmarks.step_model import LARGE, SMALL, Regime, job
from benchmarks.step_sides import Setup, TorchSide, initial_model
from piper.models.parts import FeedForward as ModelFeedForward
from piper.models.parts import rotary, rotate

VOCAB = 257


class Attention(nn.Module):
    """Compute attention whose queries, keys and values are one projection, head by head, as Megatron's are."""

    def __init__(self, r: Regime) -> None:
        super().__init__()
        self.head_dim = r.width // r.heads
        self.qkv, self.out = nn.Linear(r.width, 3 * r.width), nn.Linear(r.width, r.width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, -1, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))


class FeedForward(nn.Module):
    def __init__(self, r: Regime) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(r.width, 4 * r.width), nn.Linear(4 * r.width, r.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class RotaryAttention(nn.Module):
    """Compute grouped-query attention with rotary positions, two heads of queries to one of keys."""

    def __init__(self, r: Regime) -> None:
        super().__init__()
        self.head_dim = r.width // r.heads
        self.q, self.out = (
            nn.Linear(r.width, r.width, bias=False),
            nn.Linear(r.width, r.width, bias=False),
        )
        self.k, self.v = (nn.Linear(r.width, r.width // 2, bias=False) for _ in range(2))
        cos, sin = rotary(r.context, self.head_dim, 10_000.0)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (p(x).view(rows, length, -1, self.head_dim) for p in (self.q, self.k, self.v))
        q, k = (rotate(t, self.cos, self.sin).transpose(1, 2) for t in (q, k))
        mixed = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))


@dataclass(frozen=True)
class Kind:
    """Hold what makes one model another, and which projections of its parts are cut by columns and by rows.

    Attributes:
        norm: makes a norm of so many elements.
        attention, feed_forward: make the parts of a block.
        columns: the projections whose outputs devices share.
        positions: whether the embedding adds learned positions.
        sequence: whether devices share the tokens of what passes from layer to layer.
    """

    norm: Callable[[int], nn.Module]
    attention: Callable[[Regime], nn.Module]
    feed_forward: Callable[[Regime], nn.Module]
    columns: tuple[str, ...]
    positions: bool = False
    sequence: bool = False

    rows = ("attention.out", "feed_forward.down")

    @property
    def stream(self) -> str:
        return "tokens" if self.sequence else ""


def _swiglu(r: Regime) -> nn.Module:
    return ModelFeedForward(r.width, 4 * r.width, "silu", gated=True)


GPT_COLUMNS = ("attention.qkv", "feed_forward.up")
LLAMA_COLUMNS = (
    "attention.q",
    "attention.k",
    "attention.v",
    "feed_forward.gate",
    "feed_forward.up",
)
TENSOR = {
    "GPT": Kind(nn.LayerNorm, Attention, FeedForward, GPT_COLUMNS, positions=True),
    "GPT, sequence": Kind(
        nn.LayerNorm, Attention, FeedForward, GPT_COLUMNS, positions=True, sequence=True
    ),
    "Llama": Kind(nn.RMSNorm, RotaryAttention, _swiglu, LLAMA_COLUMNS),
    "Llama, sequence": Kind(nn.RMSNorm, RotaryAttention, _swiglu, LLAMA_COLUMNS, sequence=True),
}
"""The settings that are compared, by the names that the table shows."""
REGIMES = (LARGE, replace(SMALL, heads=4))
"""A Llama has half as many heads of keys, and each device needs one."""


class Embedded(nn.Module):
    """Look up tokens, and add their positions where the kind has learned ones."""

    def __init__(self, kind: Kind, r: Regime) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, r.width)
        self.positions = nn.Embedding(r.context, r.width) if kind.positions else None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return x if self.positions is None else x + self.positions.weight[: ids.shape[1]]


class Block(nn.Module):
    def __init__(self, kind: Kind, r: Regime) -> None:
        super().__init__()
        self.norm1, self.norm2 = kind.norm(r.width), kind.norm(r.width)
        self.attention, self.feed_forward = kind.attention(r), kind.feed_forward(r)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, name: str, r: Regime) -> None:
        super().__init__()
        kind = TENSOR[name]
        self.embedded = Embedded(kind, r)
        self.layers = nn.ModuleList(Block(kind, r) for _ in range(r.layers))
        self.norm, self.head = kind.norm(r.width), nn.Linear(r.width, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedded(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))


def tensor_job(name: str, r: Regime, global_batch: int) -> piper.Job:
    """Return the job of a kind."""
    plain = job(r, global_batch)
    return replace(plain, model=partial(Transformer, name, r), loss=loss)


class TorchTensor(TorchSide):
    """Train with ColwiseParallel and RowwiseParallel, and with SequenceParallel where the kind says so.

    Each part gathers its input once for all of its projections, so that their gradients take one message too.
    """

    def __init__(self, setup: Setup, rank: int) -> None:
        model, self._counts = initial_model(setup), rank == 0  # both ranks compute the same loss
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, _plan(TENSOR[setup.kind], setup.regime.layers))
        super().__init__(setup, model, _adamw(model), range(setup.plan.global_batch))

    def backward(self, inputs: Any, targets: Any) -> list[float]:
        losses = super().backward(inputs, targets)
        return losses if self._counts else []


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
