"""Hold the common parts of the models.

These are checks of sizes, the start of weights, rotary positions, grouped-query attention and SwiGLU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper_ir.ground.errors import JobError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "squared_relu"]
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}
"""The functions of a feed-forward part, by name; squared_relu is that of Primer (arXiv 2109.08668)."""


def check_sizes(config: object, **sizes: object) -> None:
    """Raise JobError for a size that is not a positive integer."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise JobError(
                f"{type(config).__name__}({name}={value!r}): an integer of at least 1 is needed"
            )


def check_multiple(config: object, name: str, value: int, of: str, divisor: int) -> None:
    """Raise JobError unless a size is a multiple of another."""
    if value % divisor:
        raise JobError(
            f"{type(config).__name__}({name}={value}): a multiple of {of}={divisor} is needed"
        )


def start(model: nn.Module, std: float = 0.02) -> None:
    """Draw the weights of matrices from a normal distribution of this standard deviation, and set biases to 0.

    That is GPT-2's start, and Llama's and Qwen3's `initializer_range`. Norms keep their ones.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def rotary(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [length, 1, head_dim] of the rotary angles position x theta ** (-2 i / head_dim).

    See RoFormer, arXiv 2104.09864, eq. 15. Each angle stands twice: element i turns with element i + head_dim / 2. The
    first half of the sines has the sign that the turn gives it.
    """
    exponent = torch.arange(0, head_dim, 2) / head_dim
    angle = torch.outer(torch.arange(length), theta**-exponent).unsqueeze(1)
    return angle.cos().repeat(1, 1, 2), torch.cat([-angle.sin(), angle.sin()], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x [rows, T, heads, head_dim], computed with the digits of the angles."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([b, a], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Compute causal grouped-query attention with rotary positions (GQA, arXiv 2305.13245) of x: [rows, T, width].

    With `qk_norm` there is an RMSNorm over each head's queries and keys before they are turned (Qwen3, arXiv
    2505.09388, section 2).
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.dim_of_head
        inner, grouped = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q, self.out = (
            nn.Linear(config.width, inner, bias=False),
            nn.Linear(inner, config.width, bias=False),
        )
        self.k, self.v = (nn.Linear(config.width, grouped, bias=False) for _ in range(2))
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.norm_q, self.norm_k = (nn.RMSNorm(self.head_dim, eps=config.eps) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q(x).view(rows, length, self.heads, self.head_dim)
        k = self.k(x).view(rows, length, self.kv_heads, self.head_dim)
        v = self.v(x).view(rows, length, self.kv_heads, self.head_dim)
        if self.qk_norm:
            q, k = self.norm_q(q), self.norm_k(k)
        q, k, v = (
            rotate(q, cos, sin).transpose(1, 2),
            rotate(k, cos, sin).transpose(1, 2),
            v.transpose(1, 2),
        )
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads
        )
        return self.out(mixed.transpose(1, 2).reshape(rows, length, self.heads * self.head_dim))


def norm_of(config: Any, width: int) -> nn.Module:
    """Return a norm of a `DecoderConfig`'s kind over the last `width` elements."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=config.eps)
    return nn.LayerNorm(width, eps=config.eps, bias=config.norm_bias)


class FeedForward(nn.Module):
    """Compute down(activation(gate(x)) * up(x)) of x: [..., width], or down(activation(up(x))) if it has no gate.

    See GLU Variants Improve Transformer, arXiv 2002.05202, eq. 6.
    """

    def __init__(
        self, width: int, hidden: int, activation: Activation, *, gated: bool, bias: bool = False
    ) -> None:
        super().__init__()
        self.activation, self.gated = ACTIVATIONS[activation], gated
        if gated:
            self.gate = nn.Linear(width, hidden, bias=bias)
        self.up, self.down = (
            nn.Linear(width, hidden, bias=bias),
            nn.Linear(hidden, width, bias=bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.down(self.activation(self.gate(x)) * self.up(x))
        return self.down(self.activation(self.up(x)))


class SwiGLU(nn.Module):
    """Compute the feed-forward part down(silu(gate(x)) * up(x)) (arXiv 2002.05202, eq. 6) of x: [..., width]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))
