"""Define what is trained in the comparison of tensor parallelism with torch's: a GPT and a Llama.

No projection here has a number of heads written into it that torch's `parallelize_module` would have to change: a part
takes as many heads as its weights give it. The vocabulary is odd, so that neither side shares embedding and head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import piper
from benchmarks.step_model import LARGE, SMALL, Regime, adamw, batch
from piper.models.parts import SwiGLU, rotary, rotate

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
    return SwiGLU(r.width, 4 * r.width)


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
    data = partial(batch, r.context, global_batch)
    return piper.Job(
        partial(Transformer, name, r),
        data,
        loss,
        adamw,
        global_batch=global_batch,
        tokens_per_row=r.context,
    )


def initial(name: str, r: Regime, seed: int) -> Transformer:
    """Return the model as the job makes it."""
    torch.manual_seed(seed)
    return Transformer(name, r)
