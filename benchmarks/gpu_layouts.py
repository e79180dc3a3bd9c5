"""Check on one CUDA device ranks that share the work of chunks, in bfloat16: tensor, context and expert parallelism.

`benchmarks/gpu_check.py` runs this section. It needs torch and Piper's own packages alone, and the launcher
`processes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import piper
from benchmarks.gpu import joined_pool, peak_errors
from benchmarks.measure import Goal, Row
from piper import models
from piper.models import DecoderConfig
from piper_ir.fold.memory import on_device
from piper_ir.plan.plan import Plan
from piper_runtime.launch import Pool
from piper_runtime.rank import using

COSINE, LOSSES, BYTES = Goal("above", 0.999), Goal("below", 2), Goal("below", 1)
ROWS, MICROBATCHES, STEPS, LAST = 8, 2, 50, 5
"""The rows of the global batch, the microbatches, the steps of a run, and those at its end whose losses are
compared."""
STRIDES = 4
LLAMA = models.LlamaConfig(
    layers=2, width=512, heads=8, kv_heads=4, hidden=1024, vocab=512, length=256
)
MIXTURE = models.MoEConfig(
    layers=2,
    width=512,
    heads=8,
    kv_heads=4,
    hidden=512,
    vocab=512,
    length=256,
    experts=4,
    top_k=2,
    balance=0.01,
)


@dataclass(frozen=True)
class Shared:
    """Hold a model and the strategy of two ranks that share its work."""

    config: DecoderConfig
    strategy: piper.Strategy


def cases(llama: DecoderConfig = LLAMA, mixture: DecoderConfig = MIXTURE) -> dict[str, Shared]:
    """Return each way in which two ranks share the work of chunks."""
    recipes, halves = piper.recipes, piper.split(piper.where(), microbatches=MICROBATCHES)
    ring = recipes.context_parallel(attention="ring", order="zigzag")
    experts = (*recipes.expert_parallel(), *recipes.data_parallel(over=("dp", "ep")))
    return {
        "tp=2 with tokens": Shared(
            llama,
            piper.Strategy(piper.Mesh(tp=2), (*recipes.tensor_parallel(sequence=True), halves)),
        ),
        "cp=2 by ring": Shared(llama, piper.Strategy(piper.Mesh(cp=2), (*ring, halves))),
        "ep=2": Shared(mixture, piper.Strategy(piper.Mesh(ep=2), (*experts, halves))),
    }


def counting(vocab: int, length: int, step: int, rows: range) -> tuple[Tensor, Tensor]:
    """Return rows that count on, each from a start and with a stride of its own: a model soon learns the next
    number."""
    chance = torch.Generator().manual_seed(step)
    start, stride = (
        torch.randint(n, (ROWS, 1), generator=chance)[rows.start : rows.stop]
        for n in (vocab, STRIDES)
    )
    numbers = (start + (1 + stride) * torch.arange(length + 1)) % vocab
    return numbers[:, :-1].contiguous(), numbers[:, 1:].contiguous()


def work_of(config: DecoderConfig) -> piper.Job:
    """Return the job of a case: bfloat16 beside parameters in float32."""
    made = models.job(config, global_batch=ROWS, lr=1e-3, clip_norm=1.0)
    return replace(made, batch=partial(counting, config.vocab, config.length))


def ways() -> tuple[str, ...]:
    """Return what joins ranks that share a device here."""
    return ("nccl", "gloo") if dist.is_nccl_available() else ("gloo",)


def shared_work(
    device: str,
    joined: Iterable[str],
    found: Mapping[str, Shared] | None = None,
    steps: int = STEPS,
) -> Iterator[Row]:
    """Compare two ranks that share chunks on one device with one rank, and their peaks with the plan."""
    checked = cases() if found is None else found
    with using(device):
        alone = {name: alone_of(case, steps) for name, case in checked.items()}
        for how in joined:
            with joined_pool(2, how) as pool:
                for name, case in checked.items():
                    yield from case_rows(f"{name}, {how}", case, alone[name], pool, device)


def alone_of(case: Shared, steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """Return the gradients of the first step on one rank, and the losses of all."""
    whole = piper.Strategy(
        piper.Mesh(pp=1), (piper.split(piper.where(), microbatches=MICROBATCHES),)
    )
    compiled = piper.compile(work_of(case.config), whole)
    first = piper.execute(
        compiled, steps=1, launcher="inline", gradients=True, memory=False
    ).gradients[0]
    return first, piper.execute(compiled, steps=steps, launcher="inline", memory=False).losses


def case_rows(
    title: str, case: Shared, alone: tuple[dict[str, Tensor], list[float]], pool: Pool, device: str
) -> Iterator[Row]:
    """Run a case: the first step for its gradients, then all steps for losses and memory."""
    first, losses = alone
    compiled = piper.compile(work_of(case.config), case.strategy)
    run = partial(piper.execute, compiled, launcher="processes", pool=pool)
    yield cosine_row(title, run(steps=1, gradients=True, memory=False).gradients[0], first)
    found = run(steps=len(losses))
    yield loss_row(title, found.losses, losses)
    yield memory_row(title, on_device(compiled.plan, device), found.peak_bytes)


def cosine_row(title: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Row:
    """Return the least cosine between a parameter's gradient on several ranks and on one."""
    cosines = {
        n: torch.cosine_similarity(found[n].double().flatten(), t.double().flatten(), 0).item()
        for n, t in wanted.items()
    }
    worst = min(cosines, key=lambda n: cosines[n])
    note = f"{worst}; in the middle {sorted(cosines.values())[len(cosines) // 2]:.6f}, of {len(cosines)} parameters"
    name = f"bfloat16, {title}: gradients against one rank"
    return Row("layouts", name, cosines[worst], "cosine", goal=COSINE, note=note)


def loss_row(title: str, found: list[float], wanted: list[float]) -> Row:
    """Return how far the losses are apart at the end of a run."""
    ours, theirs = (sum(values[-LAST:]) / len(values[-LAST:]) for values in (found, wanted))
    note = f"{wanted[0]:.3f} -> {theirs:.4f} on one rank, {ours:.4f} here"
    apart = 100 * abs(ours / theirs - 1)
    name = f"bfloat16, {title}: loss after {len(found)} steps"
    return Row("layouts", name, apart, "% apart", goal=LOSSES, note=note)


def memory_row(title: str, plan: Plan, asked: Mapping[int, int]) -> Row:
    """Return the most bytes by which a rank's peak is not the planned one."""
    planned, taken, note = peak_errors(plan, asked)
    name, apart = f"bfloat16, {title}: peak memory", taken - planned
    return Row("layouts", name, apart, "bytes", goal=BYTES, note=note, judged=abs(apart))
