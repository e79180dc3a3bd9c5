"""Define torch's side of a comparison of expert parallelism, written from torch's own pieces.

Each rank has some experts of every layer. The way is torchtitan's: tokens are sorted by expert, counts are exchanged,
then tokens by an all-to-all with uneven splits, which the host must know; products are grouped by expert; what comes
back is added up by token. Everything but the experts is replicated by DistributedDataParallel.

Of several ways to write a part with torch, the fastest on a CPU is taken.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.expert_model import MixtureRegime, initial, loss
from benchmarks.step_model import batch, fused_adamw

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
        self.own = config.experts // self.world
        self.tokens = torch.zeros(config.experts, dtype=torch.int64)
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


class TorchMixture:
    """Train a mixture on rows of its own per rank; the gradients of experts are terms of the mean over ranks.

    With `own_groups` gradients have a process group of their own too, whose threads are started here.
    """

    def __init__(
        self,
        regime: MixtureRegime,
        seed: int,
        global_batch: int,
        rank: int,
        own_groups: bool = False,
    ) -> None:
        self.losses: list[float] = []
        self._regime, self._size, self._step = regime, global_batch, 0
        self._world = dist.get_world_size()
        model: Any = initial(regime, seed)
        group = dist.new_group()  # of their own, so that tokens do not wait for gradients
        for layer in model.layers:
            layer.feed_forward = TorchExperts(layer.feed_forward, group)
        experts = {n: p for n, p in model.named_parameters() if n.rpartition(".")[2] in STACKS}
        self._experts = list(experts.values())
        alone = [
            *experts,
            *(name for name, _ in model.named_buffers()),
        ]  # buffers are constants here
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, alone)
        others = dist.new_group() if own_groups else None  # None is the one of the process
        self._model = DistributedDataParallel(
            model, process_group=others, gradient_as_bucket_view=True
        )
        self._optimizer = fused_adamw(model)
        rows = global_batch // self._world
        self._rows = range(rank * rows, (rank + 1) * rows)

    def step(self) -> None:
        inputs, targets = batch(self._regime.context, self._size, self._step, self._rows)
        found = loss(self._model(inputs), targets)
        found.backward()
        grads: Any = [p.grad for p in self._experts]
        torch._foreach_div_(grads, self._world)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(found.item())
        self._step += 1

    def close(self) -> None:
        """Nothing to end."""
