"""Mixtures that loop over the experts that tokens chose, in the form of Hugging Face's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper

WIDTH, HIDDEN, EXPERTS, TOP, TOKENS = 8, 12, 6, 2, 6
TAGS = {"layers.*.experts": dict(experts=0, replace="gated_experts")}


class LoopedExperts(nn.Module):
    """All experts' matrices in two tensors; forward visits the experts that anybody chose."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, WIDTH) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.3)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        with torch.no_grad():
            chosen = F.one_hot(top_k_index, num_classes=EXPERTS).permute(2, 1, 0)
            hit = chosen.sum(dim=(1, 2)).nonzero()
        for (expert,) in hit:
            choice, token = torch.where(chosen[expert])
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            made = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            out.index_add_(0, token, made * top_k_weights[token, choice, None])
        return out


class LoopedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), LoopedExperts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        share, chosen = self.router(tokens).softmax(-1).topk(TOP, dim=-1)
        return x + self.experts(tokens, chosen, share / share.sum(-1, keepdim=True)).reshape(
            x.shape
        )


class LoopedMixture(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(LoopedLayer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def untagged() -> nn.Module:
    return LoopedMixture()


def tagged() -> nn.Module:
    return piper.tag(LoopedMixture(), TAGS)


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    drawn = [
        torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(99 * step + r))
        for r in rows
    ]
    return torch.stack(drawn), torch.stack(drawn).roll(1, dims=1)


def optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def job(model: Callable[[], nn.Module]) -> piper.Job:
    precision = piper.Precision(params="float64")
    return piper.Job(
        model,
        batch,
        F.mse_loss,
        optimizer,
        global_batch=4,
        precision=precision,
        tokens_per_row=TOKENS,
    )
