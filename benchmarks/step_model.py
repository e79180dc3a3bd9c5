"""Define what is trained in the comparison with torch.distributed: a GPT, its data, and the two regimes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import piper

VOCAB = 256
DATA_ROWS = 4096


@dataclass(frozen=True)
class Regime:
    """Hold the sizes of model and batch.

    There are `rows` per microbatch and `microbatches` per step of a pipeline; `steps` per timed run make a run long
    enough to be timed. A data-parallel rank takes one microbatch per step.
    """

    name: str
    width: int
    heads: int
    layers: int
    context: int
    rows: int
    microbatches: int
    steps: int


LARGE = Regime(
    "F >= 20 ms", width=256, heads=4, layers=4, context=128, rows=5, microbatches=8, steps=1
)
SMALL = Regime(
    "F about 1 ms", width=64, heads=2, layers=4, context=32, rows=4, microbatches=8, steps=5
)
TINY = Regime("tiny", width=16, heads=2, layers=4, context=8, rows=1, microbatches=4, steps=1)
"""For the smoke test."""


class Block(nn.Module):
    def __init__(self, r: Regime) -> None:
        super().__init__()
        self.heads = r.heads
        self.ln1, self.ln2 = nn.LayerNorm(r.width), nn.LayerNorm(r.width)
        self.qkv, self.proj = nn.Linear(r.width, 3 * r.width), nn.Linear(r.width, r.width)
        self.up, self.down = nn.Linear(r.width, 4 * r.width), nn.Linear(4 * r.width, r.width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            self.qkv(self.ln1(x))
            .view(rows, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """Be a GPT whose embedding and head are not tied: torch's pipelining does not share a parameter between stages."""

    def __init__(self, r: Regime) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, r.width), nn.Embedding(r.context, r.width)
        self.layers = nn.ModuleList(Block(r) for _ in range(r.layers))
        self.norm, self.head = nn.LayerNorm(r.width), nn.Linear(r.width, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Stage(nn.Module):
    """Be one of `stages` equal parts of a GPT, as its user would cut it for torch.distributed.pipelining.

    It is the cut that `recipes.*(at="even")` makes.
    """

    def __init__(self, model: GPT, index: int, stages: int) -> None:
        super().__init__()
        size = len(model.layers) // stages
        self.layers = model.layers[index * size : (index + 1) * size]
        first, last = index == 0, index == stages - 1
        if first:
            self.tokens, self.positions = model.tokens, model.positions
        if last:
            self.norm, self.head = model.norm, model.head
        self._first, self._last = first, last

    def forward(self, x: Tensor) -> Tensor:
        if self._first:
            x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) if self._last else x


_DATA: dict[int, Tensor] = {}


def batch(context: int, global_batch: int, step: int, rows: range) -> tuple[Tensor, Tensor]:
    """Return slices of one random tensor [DATA_ROWS, context + 1], so that data costs both sides next to nothing."""
    if context not in _DATA:
        _DATA[context] = torch.randint(
            VOCAB, (DATA_ROWS, context + 1), generator=torch.Generator().manual_seed(1)
        )
    first = step % (DATA_ROWS // global_batch) * global_batch
    window = _DATA[context][first + rows.start : first + rows.stop]
    return window[:, :-1], window[:, 1:]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Make the job's optimizer; Piper runs it with torch's fused kernel, and so does `fused_adamw`."""
    return torch.optim.AdamW([p for _, p in named], lr=1e-4)


def fused_adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Make the same optimizer on real parameters."""
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


def job(r: Regime, global_batch: int) -> piper.Job:
    return piper.Job(
        partial(GPT, r),
        partial(batch, r.context, global_batch),
        loss,
        adamw,
        global_batch=global_batch,
        tokens_per_row=r.context,
    )
