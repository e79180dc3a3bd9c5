"""Define the space in which the tuner is judged: 2,000 strategies of a GPT on 8 devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper_autotune.space.problem import Programs, TuningProblem
from piper_compiler import Strategy, recipes
from piper_ir.ground.mesh import Mesh
from piper_simulator import load_cluster

CHOICES: Mapping[str, tuple[Any, ...]] = {
    "schedule": ("gpipe", "1f1b"),
    "pp": (1, 2, 4, 8),
    "microbatches": (2, 4, 6, 8, 12),
    "bucket_mb": (10, 25, 60, 150, 400),
}
BOUNDARIES = 13
"""Ways to cut the layers into stages, asked for where there is more than one.

They make 2 x 5 x 5 x (1 + 3 x 13) = 2,000 strategies, all different. dp is 8 / pp.
"""
DEVICES = 8
GLOBAL_BATCH = 192
CLUSTER = "a100x1*8"
MEMORY_LIMIT = 14 << 30
"""140 of the 2,000 fit, the fastest of them with two stages that are not even."""


@dataclass(frozen=True)
class Sizes:
    """Hold the sizes of the GPT: 16 layers of width 2,048 and a large vocabulary are a billion parameters."""

    layers: int = 16
    width: int = 2048
    heads: int = 16
    length: int = 1024
    vocab: int = 50_304


SIZES = Sizes()
TINY = Sizes(layers=16, width=16, heads=2, length=8, vocab=64)
"""For the smoke test."""


class Block(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads = s.heads
        self.norm1, self.norm2 = nn.LayerNorm(s.width), nn.LayerNorm(s.width)
        self.qkv, self.out = nn.Linear(s.width, 3 * s.width), nn.Linear(s.width, s.width)
        self.up, self.down = nn.Linear(s.width, 4 * s.width), nn.Linear(4 * s.width, s.width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(rows, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Be a GPT whose embedding and head are uneven neighbours of the layers: the best boundaries are not even."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(s.vocab, s.width),
            nn.Embedding(s.length, s.width),
        )
        self.layers = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm, self.head = nn.LayerNorm(s.width), nn.Linear(s.width, s.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def job(s: Sizes) -> piper.Job:
    """Return the job: the GPT in bfloat16 with AdamW; its batch is never used."""

    def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
        ids = torch.zeros(len(rows), s.length, dtype=torch.int64)
        return ids, ids

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.reshape(-1, s.vocab), targets.reshape(-1))

    def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named], lr=1e-4)

    precision = piper.Precision(params="bfloat16")
    return piper.Job(
        lambda: GPT(s),
        batch,
        loss,
        adamw,
        global_batch=GLOBAL_BATCH,
        tokens_per_row=s.length,
        precision=precision,
    )


@lru_cache(maxsize=2)
def problem(s: Sizes = SIZES) -> tuple[TuningProblem, Programs, dict[str, Any]]:
    """Return the captured GPT as the tuner sees it."""
    from piper.api.running.tuning import Conditions, problem_of

    made, more = problem_of(job(s), Conditions(load_cluster(CLUSTER), None, MEMORY_LIMIT))
    return made, Programs(made, more["at_rows"]), more


def cuts(pp: int, layers: int) -> tuple[tuple[int, ...], ...]:
    """Return the ways to cut the layers into `pp` stages that are in the space, nearest to even first."""
    return _all_cuts(pp, layers)[:BOUNDARIES]


@lru_cache(maxsize=8)
def _all_cuts(pp: int, layers: int) -> tuple[tuple[int, ...], ...]:
    """Yield the first layers of stages 1 and later.

    From the even cut, the first and the last stage give layers away or take some, and the stages between share what is
    left, with the larger ones first or last.
    """
    out: dict[tuple[int, ...], None] = {}
    for early, late, back in sorted(
        itertools.product(range(-6, 7), range(-6, 7), (False, True)), key=_oddness
    ):
        first, last = layers // pp - early, layers // pp - late
        inner, more = (
            divmod(layers - first - last, pp - 2) if pp > 2 else (0, layers - first - last)
        )
        if pp == 2 and more:
            continue
        rest = [inner + (k >= pp - 2 - more if back else k < more) for k in range(pp - 2)]
        sizes = (first, *rest, last)
        if min(sizes) > 0:
            out[tuple(itertools.accumulate(sizes[:-1]))] = None
    return tuple(out)


def _oddness(item: tuple[int, int, bool]) -> tuple[int, tuple[int, int, bool]]:
    return abs(item[0]) + abs(item[1]), item


def strategy(trial: Any, layers: int = SIZES.layers) -> Strategy:
    """Return one of the 2,000 strategies."""
    chosen = {name: trial.suggest_categorical(name, choices) for name, choices in CHOICES.items()}
    pp, microbatches = chosen["pp"], chosen["microbatches"]
    at = cuts(pp, layers)[trial.suggest_int("boundaries", 0, BOUNDARIES - 1)] if pp > 1 else ()
    recipe = recipes.gpipe if chosen["schedule"] == "gpipe" else recipes.one_f_one_b
    stages = recipe(pp=pp, microbatches=microbatches, at=at)
    return Strategy(
        Mesh(pp=pp, dp=DEVICES // pp),
        (*stages, *recipes.data_parallel(bucket_mb=chosen["bucket_mb"])),
    )


def large(layers: int, count: int) -> list[Strategy]:
    """Return `count` plans of about 5,000 instructions: 8 stages, nearest to even first, in both schedules."""
    out = []
    for at in _all_cuts(DEVICES, layers)[: -(-count // 2)]:
        for recipe in (recipes.gpipe, recipes.one_f_one_b):
            out.append(
                Strategy(
                    Mesh(pp=DEVICES), recipe(pp=DEVICES, microbatches=GLOBAL_BATCH // 2, at=at)
                )
            )
    return out[:count]


LEVELS: tuple[Mapping[str, Any], ...] = (
    {"zero": 0},
    {"zero": 1},
    {"zero": 2},
    {"zero": 2, "reduced_mb": "step"},
    {"zero": 3},
    {"zero": 3, "resident_mb": "step", "reduced_mb": "step"},
)
"""The space says what ranks share, and how long they keep what they have gathered or summed."""


def large_shared(layers: int, count: int) -> list[Strategy]:
    """Return `count` plans of 4 stages x 2 replicas in 1F1B, with as many of each of `LEVELS`."""
    out = []
    for at in _all_cuts(4, layers)[: -(-count // len(LEVELS))]:
        for level in LEVELS:
            stages = recipes.one_f_one_b(pp=4, microbatches=GLOBAL_BATCH // 4, at=at)
            out.append(
                Strategy(Mesh(pp=4, dp=2), (*stages, *recipes.data_parallel(bucket_mb=60, **level)))
            )
    return out[:count]


def points() -> Iterator[dict[str, Any]]:
    """Yield all points of the space."""
    for values in itertools.product(*CHOICES.values()):
        chosen = dict(zip(CHOICES, values, strict=True))
        for variant in range(BOUNDARIES) if chosen["pp"] > 1 else (None,):
            yield chosen if variant is None else {**chosen, "boundaries": variant}
