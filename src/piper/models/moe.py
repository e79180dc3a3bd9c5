"""Define a mixture of experts in a Llama of Qwen3's kind, with a capacity or dropless.

With a capacity (GShard, arXiv 2006.16668, and Switch, arXiv 2101.03961) every token goes to its `top_k` experts, and an
expert takes at most `capacity` tokens of each row. Without one (MegaBlocks, arXiv 2211.15841) an expert takes every
token that chose it: rows are sorted by expert, and one grouped product multiplies all of them. In both all shapes are
known before anything runs, and tokens of different rows never compete, so that a batch is routed the same however it is
cut into microbatches. The products of the experts are a region with the coordinate `experts`: a strategy with
`piper.shard(where(experts=ANY), ...)` shares them among devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.models.llama import Llama, LlamaBlock, LlamaConfig
from piper.models.parts import check_sizes
from piper_capture import region
from piper_ir.ground.errors import JobError
from piper_ir.ground.expert_tokens import EXPERT_TOKENS
from piper_ops import grouped_mm, route, unroute


@dataclass(frozen=True, kw_only=True)
class MoEConfig(LlamaConfig):
    """Hold the sizes of a mixture of experts: a Llama's, `hidden` being one expert's.

    Attributes:
        experts: How many a layer has.
        top_k: Experts that a token goes to.
        capacity_factor: Places of an expert over the tokens that it would get if all experts got equally many. None is
            dropless: an expert takes every token that chose it.
        balance: The weight of the loss that balances experts; 0 for none. The model then returns that loss, too.
    """

    experts: int
    top_k: int
    capacity_factor: float | None = 1.25
    balance: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, experts=self.experts, top_k=self.top_k)
        if self.top_k > self.experts:
            raise JobError(f"MoEConfig(top_k={self.top_k}): there are {self.experts} experts")
        factor = self.capacity_factor
        if factor is not None and not factor > 0:
            raise JobError(
                f"MoEConfig(capacity_factor={factor!r}): a positive number is needed, or None for "
                f"a dropless mixture"
            )
        if not 0 <= self.balance < math.inf:
            raise JobError(
                f"MoEConfig(balance={self.balance!r}): a number from 0 on is needed, such as 0.001"
            )

    def capacity(self, length: int) -> int:
        """Return the tokens that an expert takes of a row: length x top_k / experts x capacity_factor, rounded up.

        A token goes to an expert once, so there are never more than `length`.
        """
        if self.capacity_factor is None:
            return length
        return min(length, math.ceil(length * self.top_k / self.experts * self.capacity_factor))

    def build(self) -> MoE:
        """Return the module, on the device that is current; on meta nothing is allocated."""
        return MoE(self)

    def block(self) -> LlamaBlock:
        return BalancedBlock(self) if self.balance else LlamaBlock(self)

    def feed_forward(self) -> nn.Module:
        return Experts(self)


class MoE(Llama):
    """Extend a Llama with feed-forward parts of experts.

    A capacity, if there is one, bounds the tokens of each expert. With `config.balance` the result is (logits, balance
    [rows]), where `balance` is the sum over layers of `Experts.balance`. Its mean over rows is a part of the loss. It
    is the same however rows are cut into microbatches and over replicas, since it is a number of each row.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config)
        self.balanced = bool(config.balance)

    def forward(self, tokens: Tensor) -> Any:
        if not self.balanced:
            return super().forward(tokens)
        x, length, balance = self.tokens(tokens), tokens.shape[1], None
        cos, sin = self.cos[:length], self.sin[:length]
        for layer in self.layers:
            x, balance = layer(x, cos, sin, balance)
        return self.head(self.norm(x)), balance


class BalancedBlock(LlamaBlock):
    """Compute a block, and add its own term to the loss that balances experts."""

    feed_forward: Experts

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, balance: Tensor | None = None) -> Any:
        x = x + self.attention(self.norm1(x), cos, sin)
        output, more = self.feed_forward.balanced(self.norm2(x))
        return x + output, more if balance is None else balance + more


class Experts(nn.Module):
    """Compute the experts of a layer: x [rows, T, width] -> [rows, T, width].

    The result is the sum over a token's experts of share x expert(token). The shares are the softmax over all experts,
    of the chosen ones, divided by their sum (Qwen3's norm_topk_prob). An expert that is full skips later tokens, which
    keep the results of their other experts. In a dropless mixture none is ever full.
    """

    expert_tokens: Tensor

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.width, config.experts, bias=False)
        wide, narrow = (
            (config.experts, config.width, config.hidden),
            (config.experts, config.hidden, config.width),
        )
        self.register_buffer(
            EXPERT_TOKENS, torch.zeros(2 * config.experts, dtype=torch.int64), persistent=False
        )
        self.gate, self.up, self.down = (
            nn.Parameter(torch.empty(shape).normal_(std=0.02)) for shape in (wide, wide, narrow)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.combined(x, *self.routed(x))

    def balanced(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of `forward`, and the loss that balances experts, [rows]."""
        scores = self.scored(x)
        share, chosen = self.shared(x, scores)
        return self.combined(x, share, chosen), self.balance(scores, chosen)

    def combined(self, x: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        """Return the sum over the chosen experts of share x expert(token)."""
        if self.config.capacity_factor is None:
            return self.dropless(x, share, chosen)
        rows, length, width = x.shape
        top_k, places = self.config.top_k, self.config.experts * self.config.capacity(length)
        place, kept, token = self.places(chosen.flatten(1), length)
        took = x.gather(1, token.unsqueeze(-1).expand(-1, -1, width))
        gave = self.computed(took.view(rows, self.config.experts, -1, width)).reshape(
            rows, places, width
        )
        each = gave.gather(1, place.unsqueeze(-1).expand(-1, -1, width)) * (
            share.flatten(1) * kept
        ).unsqueeze(-1)
        return each.view(rows, length, top_k, width).sum(2)

    def scored(self, x: Tensor) -> Tensor:
        """Return the softmax [rows, T, experts] of each token's scores, in float32 at least.

        The router computes in the dtype of its weight, which a job may keep wider than that of x.
        """
        exact = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
        return self.router(x.to(self.router.weight.dtype)).softmax(-1, dtype=exact)

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return shares and numbers [rows, T, top_k] of each token's experts."""
        return self.shared(x, self.scored(x))

    def shared(self, x: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same, given the scores."""
        share, chosen = scores.topk(self.config.top_k, dim=-1)
        return (share / share.sum(-1, keepdim=True)).to(x.dtype), chosen

    def balance(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the loss of each row [rows] that is least when its tokens choose all experts equally often.

        That is the sum over experts of f x P: f is how often the row's tokens choose the expert, over how often they
        would if all were chosen equally often, and P its mean score (DeepSeek-V3, arXiv 2412.19437, section 2.1.2:
        the sequence-wise loss). Gradients flow through P alone.
        """
        experts, length = self.config.experts, chosen.shape[1]
        numbers = torch.arange(experts, device=chosen.device)
        often = (chosen.flatten(1).unsqueeze(-1) == numbers).sum(1).to(scores.dtype) * (
            experts / (self.config.top_k * length)
        )
        return (often * scores.mean(1)).sum(-1)

    def places(self, expert: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Assign places to expert [rows, T x top_k], in which a token's choices follow each other.

        Returns the place of each choice among the experts' places of its row (any if the expert is full), whether it
        has one, and for each place its token (any if nobody took it).
        """
        experts, capacity = self.config.experts, self.config.capacity(length)
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
        numbers = torch.arange(self.config.experts, device=chosen.device)
        self.count(
            (chosen.unsqueeze(-1) == numbers).sum(1), capacity=self.config.top_k
        )  # of one token each: none is without
        with region(experts=0):
            took, counts = route(x.flatten(0, 1), chosen, self.config.experts)
            hidden = F.silu(grouped_mm(took, counts, self.gate)) * grouped_mm(took, counts, self.up)
            y = unroute(grouped_mm(hidden, counts, self.down), chosen, share)
        return y.view_as(x)

    def count(self, chose: Tensor, capacity: int) -> None:
        """Store how many tokens chose each expert, and how many found no place, given the choices [rows, experts]."""
        self.expert_tokens = torch.cat((chose.sum(0), (chose - capacity).clamp(min=0).sum(0)))

    def computed(self, x: Tensor) -> Tensor:
        """Compute SwiGLU of x [rows, experts, capacity, width] with each expert's weights, one product per weight.

        Devices that share experts compute the region in parts; experts stand first at its ends.
        """
        rows, experts, capacity, width = x.shape
        x = x.transpose(0, 1)
        with region(experts=0):
            x = x.reshape(experts, rows * capacity, width)
            y = torch.bmm(F.silu(torch.bmm(x, self.gate)) * torch.bmm(x, self.up), self.down)
            y = y.view(experts, rows, capacity, width)
        return y.transpose(0, 1)
