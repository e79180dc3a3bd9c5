"""A Llama in the spelling of Hugging Face's: the same names of parameters, positions and mask made once for all layers,
heads of keys repeated by expand, halves rotated by slices. It is captured as theirs is, and needs no library.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper

WIDTH, HIDDEN, LAYERS, HEADS, KEYS, VOCAB, LENGTH, ROWS = 64, 96, 2, 8, 2, 128, 16, 8
HEAD = WIDTH // HEADS


def turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def repeated(x: Tensor, times: int) -> Tensor:
    rows, heads, length, size = x.shape
    return (
        x[:, :, None]
        .expand(rows, heads, times, length, size)
        .reshape(rows, heads * times, length, size)
    )


class PublishedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class PublishedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, KEYS * HEAD, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            p(x).view(*x.shape[:-1], -1, HEAD).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = (t * cos + turned(t) * sin for t in (q, k))
        k, v = repeated(k, HEADS // KEYS), repeated(v, HEADS // KEYS)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(mixed.transpose(1, 2).reshape(*x.shape[:-1], -1))


class PublishedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PublishedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = PublishedAttention(), PublishedMLP()
        self.input_layernorm, self.post_attention_layernorm = PublishedNorm(), PublishedNorm()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class PublishedBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(PublishedLayer() for _ in range(LAYERS))
        self.norm = PublishedNorm()
        self.register_buffer(
            "inv_freq", 10_000 ** -(torch.arange(0, HEAD, 2) / HEAD), persistent=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x, places = self.embed_tokens(tokens), torch.arange(tokens.shape[1])
        angles = (places[None, :, None] * self.inv_freq).repeat(1, 1, 2)
        mask = (places[None, :] <= places[:, None]).expand(len(tokens), 1, -1, -1)
        for layer in self.layers:
            x = layer(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype), mask)
        return self.norm(x)


class PublishedLlama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = PublishedBody(), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens))


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    tokens = drawn[rows.start : rows.stop]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-3)


def job(**more: Any) -> piper.Job:
    return piper.Job(PublishedLlama, batch, loss, optimizer, global_batch=ROWS, **more)
