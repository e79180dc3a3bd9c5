"""Compute a mixture of experts, with a capacity or dropless.

With a capacity (GShard, arXiv 2006.16668, and Switch, arXiv 2101.03961) every token goes to its `top_k` experts, and an
expert takes at most `capacity` tokens of each row. Without one (MegaBlocks, arXiv 2211.15841) an expert takes every
token that chose it: rows are sorted by expert, and one grouped product multiplies all of them. In both all shapes are
known before anything runs, and tokens of different rows never compete, so that a batch is routed the same however it is
cut into microbatches. The products of the experts are a region with the coordinate `experts`: a strategy with
`piper.shard(where(experts=ANY), ...)` shares them among devices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from piper.models.decoder_config import Experts
from piper.models.parts import ACTIVATIONS, Activation, FeedForward, NamedFunction
from piper_capture import region
from piper_ir.ground.expert_tokens import EXPERT_TOKENS
from piper_ops import grouped_add, grouped_mm, route, unroute

Product = Literal["gate", "up", "down"]
"""The products of an expert, by the name of their weights."""


def _results(
    product: Callable[[Tensor, Product], Tensor], hidden: Tensor, chosen: Tensor, share: Tensor
) -> Tensor:
    """Return the sum over each token's choices of share x the result of the last product."""
    total: Tensor = unroute(product(hidden, "down"), chosen, share)
    return total


class ExpertLayer(nn.Module):
    """Compute the experts of a layer: x [rows, T, width] -> [rows, T, width].

    The result is the sum over a token's experts of share x expert(token), and of the shared part's result if there is
    one. The shares are the scores of the chosen experts, divided by their sum if `normalized` (Qwen3's norm_topk_prob).
    An expert that is full skips later tokens, which keep the results of their other experts. In a dropless mixture none
    is ever full.
    """

    expert_tokens: Tensor

    def __init__(
        self, width: int, config: Experts, activation: Activation = "silu", *, gated: bool = True
    ) -> None:
        super().__init__()
        self.config, self.gated = config, gated
        self.activation, self.times = (
            NamedFunction(ACTIVATIONS[activation]),
            NamedFunction(operator.mul),
        )
        self.sort, self.results = NamedFunction(route), NamedFunction(_results)
        self.router = nn.Linear(width, config.number, bias=config.bias)
        self.register_buffer(
            EXPERT_TOKENS, torch.zeros(2 * config.number, dtype=torch.int64), persistent=False
        )
        wide, narrow = (config.number, width, config.hidden), (config.number, config.hidden, width)
        if gated:
            self.gate = nn.Parameter(torch.empty(wide).normal_(std=0.02))
        self.up, self.down = (
            nn.Parameter(torch.empty(shape).normal_(std=0.02)) for shape in (wide, narrow)
        )
        if config.bias:
            if gated:
                self.gate_bias = nn.Parameter(torch.zeros(config.number, config.hidden))
            self.up_bias = nn.Parameter(torch.zeros(config.number, config.hidden))
            self.down_bias = nn.Parameter(torch.zeros(config.number, width))
        if config.shared_hidden:
            self.shared = FeedForward(width, config.shared_hidden, activation, gated=gated)
        if config.shared_gate:
            self.shared_gate = nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.combined(x, *self.routed(x))

    def balanced(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of `forward`, and the loss that balances experts, [rows]."""
        scores = self.scored(x)
        share, chosen = self.shares(x, scores)
        return self.combined(x, share, chosen), self.balance(scores, chosen)

    def combined(self, x: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        """Return the sum over the chosen experts of share x expert(token), and the result of the shared part."""
        chose = self.dropless if self.config.capacity_factor is None else self.bounded
        y = chose(x, share, chosen)
        return self.with_shared(y, x) if not self.config.shared_within else y

    def with_shared(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the sum of the experts' result and that of the shared part, if there is one."""
        if not self.config.shared_hidden:
            return y
        shared = self.shared(x)
        return y + (self.shared_gate(x).sigmoid() * shared if self.config.shared_gate else shared)

    def bounded(self, x: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        """Return the result of experts that take at most `capacity` tokens of each row."""
        rows, length, width = x.shape
        top_k, places = self.config.top_k, self.config.number * self.config.capacity(length)
        place, kept, token = self.places(chosen.flatten(1), length)
        took = x.gather(1, token.unsqueeze(-1).expand(-1, -1, width))
        gave = self.computed(took.view(rows, self.config.number, -1, width)).reshape(
            rows, places, width
        )
        each = gave.gather(1, place.unsqueeze(-1).expand(-1, -1, width)) * (
            share.flatten(1) * kept
        ).unsqueeze(-1)
        return each.view(rows, length, top_k, width).sum(2)

    def scored(self, x: Tensor) -> Tensor:
        """Return each token's scores [rows, T, number], in float32 at least.

        The router computes in the dtype of its weight, which a job may keep wider than that of x.
        """
        exact = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
        products = self.router(x.to(self.router.weight.dtype))
        if self.config.score == "sigmoid":
            return products.to(exact).sigmoid()
        return products.softmax(-1, dtype=exact)

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return shares and numbers [rows, T, top_k] of each token's experts."""
        return self.shares(x, self.scored(x))

    def shares(self, x: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same, given the scores."""
        share, chosen = self.allowed(scores).topk(self.config.top_k, dim=-1)
        if self.config.normalized:
            share = share / share.sum(-1, keepdim=True)
        if self.config.scale != 1:
            share = share * self.config.scale
        return share.to(x.dtype), chosen

    def allowed(self, scores: Tensor) -> Tensor:
        """Return the scores, with 0 for experts outside of a token's best groups."""
        if self.config.top_groups == self.config.groups:
            return scores
        by_group = scores.unflatten(-1, (self.config.groups, -1))
        best = 2 if self.config.score == "sigmoid" else 1
        groups = by_group.topk(best, dim=-1)[0].sum(-1).topk(self.config.top_groups, dim=-1)[1]
        numbers = torch.arange(self.config.groups, device=scores.device)
        taken = (groups.unsqueeze(-1) == numbers).any(-2)
        return (by_group * taken.unsqueeze(-1)).flatten(-2)

    def balance(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the loss of each row [rows] that is least when its tokens choose all experts equally often.

        That is the sum over experts of f x P: f is how often the row's tokens choose the expert, over how often they
        would if all were chosen equally often, and P its mean share of all scores (DeepSeek-V3, arXiv 2412.19437,
        section 2.1.2: the sequence-wise loss). Gradients flow through P alone.
        """
        experts, length = self.config.number, chosen.shape[1]
        numbers = torch.arange(experts, device=chosen.device)
        often = (chosen.flatten(1).unsqueeze(-1) == numbers).sum(1).to(scores.dtype) * (
            experts / (self.config.top_k * length)
        )
        if self.config.score == "sigmoid":
            scores = scores / scores.sum(-1, keepdim=True)
        return (often * scores.mean(1)).sum(-1)

    def places(self, expert: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Assign places to expert [rows, T x top_k], in which a token's choices follow each other.

        Returns the place of each choice among the experts' places of its row (any if the expert is full), whether it
        has one, and for each place its token (any if nobody took it).
        """
        experts, capacity = self.config.number, self.config.capacity(length)
        numbers = torch.arange(experts, device=expert.device)
        before = (expert.unsqueeze(-1) == numbers).cumsum(
            1, dtype=torch.int32
        )  # this choice and the earlier ones, by expert
        self.count(before[:, -1], capacity)
        turn = before.gather(-1, expert.unsqueeze(-1)).squeeze(-1) - 1
        kept = turn < capacity
        place = torch.where(
            kept, expert * capacity + turn, experts * capacity
        )  # one more place for all that have none
        token = torch.arange(expert.shape[1], device=expert.device) // self.config.top_k
        taken = (
            torch.zeros_like(expert[:, :1])
            .repeat(1, experts * capacity + 1)
            .scatter(1, place, token.expand_as(place))
        )
        return place.clamp(max=experts * capacity - 1), kept, taken[:, :-1]

    def dropless(self, x: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        """Return the result of experts that take every token: a row for each choice, sorted by expert, and back."""
        share, chosen = share.flatten(0, 1), chosen.flatten(0, 1)
        numbers = torch.arange(self.config.number, device=chosen.device)
        self.count(
            (chosen.unsqueeze(-1) == numbers).sum(1), capacity=self.config.top_k
        )  # of one token each: none is without
        biased = self.config.bias
        with region(experts=0):
            took, counts = self.sort(x.flatten(0, 1), chosen, self.config.number)

            def product(x: Tensor, name: Product) -> Tensor:
                y: Tensor = grouped_mm(x, counts, getattr(self, name))
                return grouped_add(y, counts, getattr(self, f"{name}_bias")) if biased else y

            y = self.results(product, self.hidden(took, product), chosen, share)
            if self.config.shared_within:
                y = self.with_shared(y.view_as(x), x)
        return y.view_as(x)

    def count(self, chose: Tensor, capacity: int) -> None:
        """Store how many tokens chose each expert, and how many found no place, given the choices [rows, experts]."""
        self.expert_tokens.copy_(torch.cat((chose.sum(0), (chose - capacity).clamp(min=0).sum(0))))

    def computed(self, x: Tensor) -> Tensor:
        """Compute x [rows, experts, capacity, width] with each expert's weights, one product per weight.

        Devices that share experts compute the region in parts; experts stand first at its ends.
        """
        rows, experts, capacity, width = x.shape
        x, biased = x.transpose(0, 1), self.config.bias
        with region(experts=0):
            x = x.reshape(experts, rows * capacity, width)

            def product(x: Tensor, name: Product) -> Tensor:
                y = torch.bmm(x, getattr(self, name))
                return y + getattr(self, f"{name}_bias").unsqueeze(1) if biased else y

            y = product(self.hidden(x, product), "down").view(experts, rows, capacity, width)
        return y.transpose(0, 1)

    def hidden(self, x: Tensor, product: Callable[[Tensor, Product], Tensor]) -> Tensor:
        """Return the elements between an expert's products."""
        if not self.gated:
            return self.activation(product(x, "up"))
        gate, up = product(x, "gate"), product(x, "up")
        if (bound := self.config.clamp) is not None:
            gate, up = gate.clamp(max=bound), up.clamp(-bound, bound) + 1
        return self.times(self.activation(gate), up)
