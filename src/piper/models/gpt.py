"""Define GPT: learned positions, LayerNorm before each part, GELU, one embedding for both ends.

See GPT-2, and GPT-3, arXiv 2005.14165.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.models.parts import check_multiple, check_sizes, start
from piper_ir.ground.errors import JobError


@dataclass(frozen=True)
class GPTConfig:
    """Hold the sizes of a GPT, whose feed-forward part is 4 x width wide; raise JobError if they do not fit together.

    Attributes:
        layers: Number of blocks.
        width: d_model.
        heads: Heads of attention.
        vocab: Number of tokens.
        length: Tokens of a row, which are also the learned positions.
        tied: Whether embedding and head are one parameter.
        attention: "fused" keeps no matrix of tokens x tokens if a device has such a kernel. "math" writes attention out
            with matmul, softmax and dropout, as stacks did before such kernels, and saves the tensors that these save.
        dropout: The share of attention's probabilities, of the output that each part adds to the tokens, and of the
            embedding that is set to 0. With it, "fused" is written out as well, in float32.
    """

    layers: int
    width: int
    heads: int
    vocab: int = 50_257
    length: int = 2_048
    tied: bool = True
    attention: Literal["fused", "math"] = "fused"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_sizes(
            self,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            vocab=self.vocab,
            length=self.length,
        )
        check_multiple(self, "width", self.width, "heads", self.heads)
        if self.attention not in ("fused", "math"):
            raise JobError(f"GPTConfig(attention={self.attention!r}): 'fused' or 'math' is needed")
        if not isinstance(self.dropout, float | int) or not 0 <= self.dropout < 1:
            raise JobError(
                f"GPTConfig(dropout={self.dropout!r}): a share of at least 0 and below 1 is needed"
            )

    def build(self) -> GPT:
        """Return the module, on the device that is current; on meta nothing is allocated."""
        return GPT(self)


class GPTBlock(nn.Module):
    """Compute attention over all earlier tokens, then the feed-forward part.

    GPT-3 alternates this with banded sparse attention (2005.14165, section 2.1); here every layer is dense.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads, self.attention, self.dropout = (
            config.heads,
            config.attention,
            float(config.dropout),
        )
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(rows, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = self._attend(q, k, v)
        x = x + self._dropped(self.out(mixed.transpose(1, 2).reshape(rows, length, width)))
        return x + self._dropped(self.down(F.gelu(self.up(self.norm2(x)))))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the causal attention of q, k and v, all [rows, heads, T, head_dim]."""
        if self.attention == "fused":
            return F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
            )
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        later = torch.full(scores.shape[-2:], float("-inf"), dtype=q.dtype, device=q.device).triu(1)
        return self._dropped(torch.softmax(scores + later, -1)) @ v

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(nn.Module):
    """Map tokens [rows, T] int64, T at most `config.length`, to logits [rows, T, vocab]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(config.vocab, config.width),
            nn.Embedding(config.length, config.width),
        )
        self.layers = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.norm, self.head = (
            nn.LayerNorm(config.width),
            nn.Linear(config.width, config.vocab, bias=False),
        )
        self.dropout = float(config.dropout)
        start(self)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        if self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
