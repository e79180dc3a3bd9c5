"""Small GPTs and Llamas: d_model 16, 8 positions, 32 tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, T, VOCAB = 16, 8, 32


class GPTBlock(nn.Module):
    def __init__(self, d: int = D, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, d = x.shape
        q, k, v = (
            t.view(rows, length, self.heads, d // self.heads).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).split(d, dim=-1)
        )
        mixed = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(rows, length, d)
        )
        x = x + F.dropout(self.out(mixed), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class TinyGPT(nn.Module):
    """Learned positions, LayerNorm, causal attention; embedding and head are one parameter if `tied`."""

    def __init__(
        self,
        layers: int = 3,
        tied: bool = True,
        dropout: float = 0.0,
        d: int = D,
        vocab: int = VOCAB,
        length: int = T,
    ) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, d), nn.Embedding(length, d)
        self.layers = nn.ModuleList(GPTBlock(d, dropout=dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class DeepGPT(TinyGPT):
    """Eight layers, enough for two chunks on each of four devices; what layer 1 makes skips to layer 6. Embedding and
    head are tied."""

    def __init__(self) -> None:
        super().__init__(layers=8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        early = x
        for k, layer in enumerate(self.layers):
            x = layer(x + early if k == 6 else x)
            early = x if k == 1 else early
        return self.head(self.norm(x))


class LlamaBlock(nn.Module):
    """RMSNorm, rotary positions, grouped-query attention (4 query heads, 2 of keys), SwiGLU."""

    def __init__(self, d: int = D, heads: int = 4, kv_heads: int = 2, hidden: int = 2 * D) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, d // heads
        self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.q = nn.Linear(d, d, bias=False)
        self.k, self.v = (nn.Linear(d, kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.out = nn.Linear(d, d, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(*shape, bias=False) for shape in ((d, hidden), (d, hidden), (hidden, d))
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, d = x.shape
        y = self.norm1(x)
        q = rotate(
            self.q(y).view(rows, length, self.heads, self.head_dim).transpose(1, 2), cos, sin
        )
        k = rotate(
            self.k(y).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2), cos, sin
        )
        v = self.v(y).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, d))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [rows, heads, T, head_dim]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class TinyLlama(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, layers: int = 2, d: int = D, heads: int = 4, length: int = T) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, d)
        self.layers = nn.ModuleList(LlamaBlock(d, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(d, eps=1e-5), nn.Linear(d, VOCAB, bias=False)
        half = d // heads // 2
        angle = torch.outer(torch.arange(length), 10_000.0 ** (-torch.arange(half) / half)).repeat(
            1, 2
        )
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        length = tokens.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))
