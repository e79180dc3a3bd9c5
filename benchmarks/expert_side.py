"""Compare expert parallelism of a dropless mixture of `piper.models`: its sizes, and torch's side of torch's pieces.

Each rank has some experts of every layer. The way is torchtitan's: tokens are sorted by expert, counts are exchanged,
then tokens by an all-to-all with uneven splits, which the host must know; products are grouped by expert; what comes
back is added up by token. Everything but the experts is replicated by DistributedDataParallel.

Of several ways to write a part with torch, the fastest on a CPU is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import piper
from benchmarks.step_model import VOCAB, Regime, fused_adamw, job
from benchmarks.step_sides import Setup, TorchSide, initial_model
from piper.models import DecoderConfig, MoEConfig

EXPERTS = "experts"
"""The kind of this comparison."""


@dataclass(frozen=True)
class MixtureRegime(Regime):
    """Hold the sizes of a mixture too: `hidden` is that of one expert, and every token goes to `top_k` of `experts`."""

    hidden: int = 0
    experts: int = 32
    top_k: int = 4
    dtype: str = "float32"

    @property
    def config(self) -> DecoderConfig:
        return MoEConfig(
            layers=self.layers, width=self.width, heads=self.heads, kv_heads=self.heads // 2, hidden=self.hidden,
            vocab=VOCAB, length=self.context, experts=self.experts, top_k=self.top_k, capacity_factor=None,
        )  # fmt: skip


ALIKE: Any = dict(heads=4, layers=4, microbatches=1)
LARGE = MixtureRegime("compute dominates", 256, context=128, rows=8, steps=1, hidden=256, **ALIKE)
SMALL = MixtureRegime("messages dominate", 64, context=32, rows=4, steps=5, hidden=32, **ALIKE)
REGIMES = (LARGE, SMALL)


def expert_job(r: MixtureRegime, global_batch: int) -> piper.Job:
    """Return the job of a mixture."""
    return replace(job(r, global_batch), model=r.config.build, precision=piper.Precision(r.dtype))


STACKS = ("gate", "up", "down")
"""The weights of experts, [experts, ...]."""


class Exchange(torch.autograd.Function):
    """Send each rank its part of the rows, of `sent` sizes, and return what comes in, of `got` sizes; and back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], got: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.got, ctx.group = sent, got, group
        out = rows.new_empty((sum(got), rows.shape[1]))
        dist.all_to_all_single(out, rows.contiguous(), got, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return Exchange.apply(grads[0], ctx.got, ctx.sent, ctx.group), None, None, None


class TorchExperts(nn.Module):
    """Compute the experts of a layer, of which this rank has some: x [rows, T, width] -> [rows, T, width]."""

    def __init__(self, whole: nn.Module, group: Any) -> None:
        super().__init__()
        config: Any = whole.config
        self.router, self.top_k, self.group = whole.router, config.top_k, group
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.own = config.number // self.world
        self.tokens = torch.zeros(config.number, dtype=torch.int64)
        """How many tokens chose each expert: torchtitan counts them, and ours does."""
        mine = slice(self.rank * self.own, (self.rank + 1) * self.own)
        self.gate, self.up, self.down = (
            nn.Parameter(getattr(whole, name).detach()[mine].clone()) for name in STACKS
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, x.shape[-1])
        shares, chosen = self.router(tokens).softmax(-1).topk(self.top_k, dim=-1)
        shares = shares / shares.sum(-1, keepdim=True)
        expert, order = chosen.view(-1).sort(stable=True)
        token = order // self.top_k
        counts = torch.bincount(expert, minlength=self.own * self.world)
        self.tokens.add_(counts)
        gave = self._exchanged(tokens.index_select(0, token), counts) * shares.view(
            -1
        ).index_select(0, order).unsqueeze(1)
        return (
            torch.zeros_like(tokens)
            .scatter_add(0, token.unsqueeze(1).expand_as(gave), gave)
            .view_as(x)
        )

    def _exchanged(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Send tokens, sorted by expert, to the ranks of their experts, compute them there, and get them back."""
        came = torch.empty_like(counts)
        dist.all_to_all_single(came, counts, group=self.group)
        sent, got = (
            counts.view(self.world, self.own).sum(1).tolist(),
            came.view(self.world, self.own),
        )
        received, each = got.sum(1).tolist(), got.tolist()
        given = Exchange.apply(tokens, sent, received, self.group)
        made = self._computed(_turned(given, each), got.sum(0))
        return Exchange.apply(
            _turned(made, [list(sizes) for sizes in zip(*each, strict=True)]),
            received,
            sent,
            self.group,
        )

    def _computed(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute SwiGLU of rows, sorted by expert. Torch's grouped product, the faster way, has no float64."""
        if rows.dtype != torch.float64:
            ends = counts.cumsum(0, dtype=torch.int32)
            hidden = F.silu(F.grouped_mm(rows, self.gate, offs=ends)) * F.grouped_mm(
                rows, self.up, offs=ends
            )
            return F.grouped_mm(hidden, self.down, offs=ends)
        parts = zip(
            rows.split(counts.tolist()),
            self.gate.unbind(),
            self.up.unbind(),
            self.down.unbind(),
            strict=True,
        )
        return torch.cat([(F.silu(x @ gate) * (x @ up)) @ down for x, gate, up, down in parts])


def _turned(rows: Tensor, sizes: list[list[int]]) -> Tensor:
    """Return rows that lie in blocks of these sizes, [i][j], with the blocks in the order [j][i]."""
    blocks = iter(rows.split([size for of in sizes for size in of]))
    table = [[next(blocks) for _ in of] for of in sizes]
    return torch.cat([block for of in zip(*table, strict=True) for block in of])


class TorchMixture(TorchSide):
    """Train a mixture on rows of its own per rank; the gradients of experts are terms of the mean over ranks."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self._world = dist.get_world_size()
        model = initial_model(setup)
        group = dist.new_group()  # of their own, so that tokens do not wait for gradients
        for layer in model.layers:
            layer.feed_forward = TorchExperts(layer.feed_forward, group)
        experts = {n: p for n, p in model.named_parameters() if n.rpartition(".")[2] in STACKS}
        self._experts = list(experts.values())
        alone = [*experts, *(name for name, _ in model.named_buffers())]  # constants here
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, alone)
        replicated = DistributedDataParallel(model, gradient_as_bucket_view=True)
        super().__init__(setup, replicated, fused_adamw(model), setup.rows_of(rank))

    def backward(self, inputs: Any, targets: Any) -> list[float]:
        losses = super().backward(inputs, targets)
        grads: Any = [p.grad for p in self._experts]
        torch._foreach_div_(grads, self._world)
        return losses
