"""Define what is trained in the comparison of expert parallelism with torch's: a dropless mixture of `piper.models`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import piper
from benchmarks.step_model import VOCAB, Regime, adamw, batch
from piper.models import MoEConfig

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
    def config(self) -> MoEConfig:
        return MoEConfig(
            layers=self.layers, width=self.width, heads=self.heads, kv_heads=self.heads // 2, hidden=self.hidden,
            vocab=VOCAB, length=self.context, experts=self.experts, top_k=self.top_k, capacity_factor=None,
        )  # fmt: skip


LARGE = MixtureRegime(
    "compute dominates",
    256,
    heads=4,
    layers=4,
    context=128,
    rows=8,
    microbatches=1,
    steps=1,
    hidden=256,
)
SMALL = MixtureRegime(
    "messages dominate",
    64,
    heads=4,
    layers=4,
    context=32,
    rows=4,
    microbatches=1,
    steps=5,
    hidden=32,
)
REGIMES = (LARGE, SMALL)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))


def expert_job(r: MixtureRegime, global_batch: int) -> piper.Job:
    data = partial(batch, r.context, global_batch)
    precision = piper.Precision(params=r.dtype)
    return piper.Job(
        r.config.build,
        data,
        loss,
        adamw,
        global_batch=global_batch,
        tokens_per_row=r.context,
        precision=precision,
    )


def initial(r: MixtureRegime, seed: int) -> nn.Module:
    """Return the model as the job makes it."""
    torch.manual_seed(seed)
    return r.config.build().to(getattr(torch, r.dtype))
