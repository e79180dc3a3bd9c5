"""Hold the common parts of the models.

These are checks of sizes, the start of weights, rotary positions, norms and the feed-forward part.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper_ir.ground.errors import JobError

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu"]
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}
"""The functions of a feed-forward part, by name.

squared_relu is that of Primer (arXiv 2109.08668), quick_gelu the sigmoid form of GELU (arXiv 1606.08415, section 2).
"""


LARGEST_SIZE = 2**28
"""The largest size: the bytes of a matrix of two of them are a number that torch can hold."""
MOST_LAYERS = 2**16


def check_sizes(config: object, **sizes: object) -> None:
    """Raise JobError for a size that is not a positive integer, or larger than any model's."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise JobError(
                f"{type(config).__name__}({name}={value!r}): an integer of at least 1 is needed"
            )
        most = MOST_LAYERS if name == "layers" else LARGEST_SIZE
        if value > most:
            raise JobError(f"{type(config).__name__}({name}={value}): at most {most:,} is accepted")


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


def norm_of(config: Any, width: int) -> nn.Module:
    """Return a norm of a `DecoderConfig`'s kind over the last `width` elements."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=config.eps)
    return nn.LayerNorm(width, eps=config.eps, bias=config.norm_bias)


class NamedFunction(nn.Module):
    """Compute a function, under a module's name: `recompute(modules="*.core")` selects by the names of modules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class FeedForward(nn.Module):
    """Compute down(activation(gate(x)) * up(x)) of x: [..., width], or down(activation(up(x))) if it has no gate.

    See GLU Variants Improve Transformer, arXiv 2002.05202, eq. 6.
    """

    def __init__(
        self, width: int, hidden: int, activation: Activation, *, gated: bool, bias: bool = False
    ) -> None:
        super().__init__()
        self.activation, self.gated = NamedFunction(ACTIVATIONS[activation]), gated
        self.times = NamedFunction(operator.mul)
        if gated:
            self.gate = nn.Linear(width, hidden, bias=bias)
        self.up, self.down = (
            nn.Linear(width, hidden, bias=bias),
            nn.Linear(hidden, width, bias=bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.down(self.times(self.activation(self.gate(x)), self.up(x)))
        return self.down(self.activation(self.up(x)))
