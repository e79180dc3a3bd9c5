"""Define GPT: learned positions, LayerNorm before each part, GELU, one embedding for both ends.

See GPT-2, and GPT-3, arXiv 2005.14165.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from piper.models.parts import check_multiple, check_sizes, start


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
    """

    layers: int
    width: int
    heads: int
    vocab: int = 50_257
    length: int = 2_048
    tied: bool = True

    def __post_init__(self) -> None:
        check_sizes(self, layers=self.layers, width=self.width, heads=self.heads, vocab=self.vocab, length=self.length)
        check_multiple(self, "width", self.width, "heads", self.heads)

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
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Map tokens [rows, T] int64, T at most `config.length`, to logits [rows, T, vocab]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(config.vocab, config.width), nn.Embedding(config.length, config.width)
        self.layers = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, config.vocab, bias=False)
        start(self)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
