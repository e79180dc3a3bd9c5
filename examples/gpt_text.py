"""A small byte-level GPT on real text (the Python standard library's source), for two workers.

python examples/gpt_text.py            the loop: profile, tune in simulation, confirm the best two, train 60 steps, report;
                                       then a worker is killed, and the training goes on (--no-kill leaves this out)
piper simulate examples/gpt_text.py    a prediction alone, for the strategy of `params`; -p pp=1 for another
piper tune examples/gpt_text.py        the search alone
piper run examples/gpt_text.py         training alone
piper explain examples/gpt_text.py     what runs where, and why
"""

from __future__ import annotations

import math
import os
import signal
import sys
import sysconfig
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import piper

WIDTH, HEADS, LAYERS, CONTEXT, VOCAB = 128, 4, 6, 128, 256
GLOBAL_BATCH, STEPS = 32, 60
KILLED_STEPS, SAVED_EVERY, KILLED_IN = 12, 5, 7
"""The second, short training: its steps, how often it is saved, and the step in which a worker is killed."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            self.qkv(self.ln1(x))
            .view(rows, length, 3, HEADS, width // HEADS)
            .permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """The embedding and the head share one weight, although they sit on different pipeline stages."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


_TEXT: list[Tensor] = []


def text() -> Tensor:
    """The source of the standard library's top-level modules as bytes, read once per process."""
    if not _TEXT:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        _TEXT.append(
            torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
        )
    return _TEXT[0]


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    """Row r of a step starts at a place that depends on the step and r only: every strategy sees the same data."""
    source = text()
    picks = torch.randint(
        len(source) - CONTEXT - 1, (GLOBAL_BATCH,), generator=torch.Generator().manual_seed(step)
    )
    windows = torch.stack(
        [source[i : i + CONTEXT + 1] for i in picks[rows.start : rows.stop].tolist()]
    ).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Weight decay for matrices only."""
    groups: list[dict[str, Any]] = [
        {"params": [p for _, p in named if p.ndim >= 2]},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


# In float32: on a CPU with products of bfloat16 a step takes as long, and on one without them ten times as long. On
# GPUs give precision=piper.Precision(params="float32", compute="bfloat16").
job = piper.Job(
    GPT, batch, loss, optimizer, global_batch=GLOBAL_BATCH, tokens_per_row=CONTEXT, clip_norm=1.0
)
steps = STEPS
params = {"pp": 2, "schedule": "1f1b", "microbatches": 8, "bucket_mb": 1}
"""What `strategy` gets where nobody searches."""


def strategy(trial: Any) -> piper.Strategy:
    """Two pipeline stages, or two replicas of the whole model."""
    pp = trial.suggest_categorical("pp", (2, 1))
    microbatches = trial.suggest_categorical("microbatches", (2, 4, 8, 16))
    if pp == 2:
        schedules = {"gpipe": piper.recipes.gpipe, "1f1b": piper.recipes.one_f_one_b}
        schedule = schedules[trial.suggest_categorical("schedule", tuple(schedules))]
        return piper.Strategy(piper.Mesh(pp=2), schedule(pp=2, microbatches=microbatches))
    reduced = piper.recipes.data_parallel(
        bucket_mb=trial.suggest_categorical("bucket_mb", (0.25, 1, 4))
    )
    return piper.Strategy(
        piper.Mesh(dp=2), (piper.split(piper.where(), microbatches=microbatches), *reduced)
    )


def unigram_entropy() -> float:
    """Nats per byte of the best model that ignores context: what training has to beat."""
    p = torch.bincount(text().long(), minlength=VOCAB).double() / len(text())
    return float(-(p * p.clamp_min(1e-300).log()).sum())


def killing_batch(mark: Path, step: int, rows: range) -> tuple[Tensor, Tensor]:
    """Give the same rows as `batch`, but kill the first worker that asks for those of step KILLED_IN, once."""
    if step == KILLED_IN:
        try:
            mark.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        except FileExistsError:
            pass  # it was killed already
    return batch(step, rows)


def outlive_a_kill(compiled: piper.Compiled, losses: list[float]) -> None:
    """Train the first steps again, with a worker that is killed; the losses must be those of the run before."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        killed = replace(job, batch=partial(killing_batch, folder / "killed"))
        saved = piper.Checkpoints(folder / "saved", every=SAVED_EVERY)
        run = piper.execute(
            compiled, killed, steps=KILLED_STEPS, launcher="processes", checkpoint=saved, restarts=1
        )
    far = max(abs(a - b) / abs(b) for a, b in zip(run.losses, losses[:KILLED_STEPS], strict=True))
    for r in run.restarts:
        print(
            f"killed in step {r.step}: the run went on from step {r.resumed}; its next step was done after "
            f"{r.seconds or 0:.1f} s"
        )
    print(
        f"losses of its {KILLED_STEPS} steps and of the run before differ by at most {far:.0e} of their size"
    )
    if len(run.restarts) != 1 or not far < 1e-4:
        raise SystemExit("a run that lost a worker is not equal to one that did not")


def main() -> None:
    from piper.sessions.autopilot import loop
    from piper.sessions.training import Settings
    from piper_runtime.launch import RunOptions

    options, settings = RunOptions(steps=STEPS), Settings(name="gpt_text")
    done = loop(job, strategy, options, baseline=params, settings=settings)
    run = done.run
    entropy = unigram_entropy()
    print(
        f"loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f} nats per byte; unigram entropy of the text {entropy:.3f}"
    )
    if not math.isfinite(run.losses[-1]) or run.losses[-1] > 0.95 * entropy:
        raise SystemExit(
            f"the final loss is not below 0.95 of the unigram entropy ({0.95 * entropy:.3f}): training went wrong"
        )
    if "--no-kill" not in sys.argv[1:]:
        outlive_a_kill(done.compiled, run.losses)


if __name__ == "__main__":
    main()
