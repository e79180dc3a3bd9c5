"""Check on one CUDA device what ranks keep: shared states, mixed precision, recomputation, checkpoints beside training.

`benchmarks/gpu_check.py` runs these sections. All but `overheads` need torch and Piper's own packages alone, and the
launcher `processes`.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

import piper
from benchmarks.gpu import EQUAL, difference, error_row, joined_pool, peak_errors
from benchmarks.measure import Goal, Row, pairs_row
from benchmarks.step_model import Regime, adamw, job
from piper import models
from piper.models import DecoderConfig
from piper_ir.fold.memory import on_device
from piper_ir.plan.plan import COMPUTE, Plan, RolePlan
from piper_runtime.engine import MemoryRecord
from piper_runtime.launch import WARMUP_STEPS, Pool
from piper_runtime.rank import using

if TYPE_CHECKING:
    from piper_simulator import Cluster

SHARED = Regime(
    "in float64", width=256, heads=4, layers=4, context=64, rows=4, microbatches=4, steps=1
)
ROOM = Goal("below", 4096)
"""The bytes beyond the plan that an instruction may leave: numbers of a step, and no bucket, gradient or message."""
PEAK, OVERHEAD, LOSSES = Goal("below", 0.1), Goal("below", 3), Goal("below", 0.5)
BLOCKED, BESIDE = Goal("below", 100), Goal("below", 1.05)
SPEED = Goal("above", 1.0)
BUCKET_MB = 1
POLICIES = ("products", "attention", "inputs")
RECOMPUTED: dict[str, DecoderConfig] = {
    "GPT, width 1024, 4 blocks": models.GPTConfig(
        layers=4, width=1024, heads=16, vocab=8192, length=1024
    ),
    "Llama, width 1024, 4 blocks": models.LlamaConfig(
        layers=4, width=1024, heads=16, kv_heads=4, hidden=3584, vocab=8192, length=1024
    ),
}
ROWS, STEPS, ROUNDS = 16, 10, 3
SAVED_BYTES = 10 << 30
WIDTH, TOKENS = 4096, 4096
"""The sizes of the model whose state is saved beside its steps."""


def sections() -> Iterator[partial[Iterator[Row]]]:
    """Yield the sections that need no simulator."""
    yield partial(sharded, "cuda", ("nccl", "gloo") if dist.is_nccl_available() else ("gloo",))
    yield partial(mixed, "cuda", RECOMPUTED)
    yield partial(peaks, "cuda", RECOMPUTED)
    yield partial(saved, "cuda", SAVED_BYTES)


# --- states that ranks share


def sharded(device: str, ways: Iterable[str], regime: Regime = SHARED) -> Iterator[Row]:
    """Compare ranks that share states on one device with one rank, and what they hold with the plan.

    NCCL's gathers and scatters may keep tensors: then an instruction leaves more than its plan says, for as long as the
    device is behind the host.
    """
    work = replace(
        job(regime, regime.rows * regime.microbatches), precision=piper.Precision(params="float64")
    )
    one = piper.Strategy(
        piper.Mesh(pp=1), (piper.split(piper.where(), microbatches=regime.microbatches),)
    )
    with using(device):
        alone = piper.execute(piper.compile(work, one), steps=3, launcher="inline", memory=False)
        for how in ways:
            with joined_pool(4, how) as pool:
                for name, strategy in shared_strategies(regime.microbatches).items():
                    compiled = piper.compile(work, strategy)
                    run = piper.execute(compiled, steps=3, launcher="processes", pool=pool)
                    yield from sharded_rows(
                        f"float64, {name}, {how}", compiled.plan, run, alone, device
                    )


def shared_strategies(microbatches: int) -> dict[str, piper.Strategy]:
    """Return strategies of two and of four ranks, without ZeRO and with each of its levels."""
    recipes, m = piper.recipes, microbatches // 2
    pipelines = {
        "dp=2": (1, (piper.split(piper.where(), microbatches=m),)),
        "pp=2 x dp=2 1F1B": (2, recipes.one_f_one_b(pp=2, microbatches=m)),
        "pp=2 x dp=2 ZBV": (2, recipes.zbv(pp=2, microbatches=m)),
    }
    stages = recipes.one_f_one_b(pp=2, microbatches=microbatches)
    return {"pp=2 1F1B": piper.Strategy(piper.Mesh(pp=2), stages)} | {
        f"{name} zero={zero}": piper.Strategy(
            piper.Mesh(pp=pp, dp=2), (*made, *recipes.data_parallel(zero=zero, bucket_mb=BUCKET_MB))
        )
        for name, (pp, made) in pipelines.items()
        for zero in range(4)
    }


def sharded_rows(
    title: str, plan: Plan, run: piper.Run, alone: piper.Run, device: str
) -> Iterator[Row]:
    """Return the difference of a run from one rank, the bytes that it kept beyond its plan, and the error of its
    peak."""
    name, unlike = f"{title}: difference from one rank", difference(run, alone)
    yield Row("sharded", name, unlike, "relative", goal=EQUAL)
    kept, where = kept_beyond(plan, run.memory)
    note = f"after {where}" if kept else ""
    yield Row("sharded", f"{title}: kept beyond the plan", kept, "bytes", goal=ROOM, note=note)
    yield peak_row("memory", title, on_device(plan, device), run.peak_bytes)


def kept_beyond(plan: Plan, records: Mapping[int, MemoryRecord]) -> tuple[int, str]:
    """Return the most bytes that any compute instruction left beyond its plan, and where."""
    worst, where = 0, ""
    for rank, record in records.items():
        role = plan.role_of(rank)
        left = {p.instr: p.after - record.states for p in record.points}
        for index, planned in kept_by(plan, role).items():
            if left[index] - planned > worst:
                worst, where = left[index] - planned, f"{role.program[index].name} on rank {rank}"
    return worst, where


def kept_by(plan: Plan, role: RolePlan) -> dict[int, int]:
    """Return the bytes of values that are there after each compute instruction of a role, as the plan says."""

    def size(ids: Iterable[str]) -> int:
        return sum(plan.values[v].nbytes for v in ids)

    live, out = size(role.allocs_first), dict[int, int]()
    for index, instr in enumerate(role.program):
        if instr.stream == COMPUTE:
            live += size(instr.allocs_after) - size(instr.frees_before)
            live += sum(size(p.writes) - size(p.frees) for p in instr.parts)
            out[index] = live
    return out


def peak_row(section: str, title: str, plan: Plan, asked: Mapping[int, int]) -> Row:
    """Return the largest error of a rank's planned peak, by what the allocator was asked for."""
    planned, taken, note = peak_errors(plan, asked)
    return error_row(section, f"{title}: peak memory", 100 * (planned / taken - 1), PEAK, note)


# --- mixed precision


def mixed(
    device: str, sizes: Mapping[str, DecoderConfig], rows: int = ROWS, steps: int = STEPS
) -> Iterator[Row]:
    """Compare bfloat16 beside parameters in float32 with plain torch that keeps masters: losses, and seconds per step.

    Runs of the two sides alternate, each from the initial state.
    """
    count = WARMUP_STEPS + steps
    here = torch.device(device, 0) if device == "cuda" else torch.device(device)
    with using(device), Pool(1) as pool:
        for name, config in sizes.items():
            work = models.job(config, global_batch=rows)
            halves = (piper.split(piper.where(), microbatches=4),)
            compiled = piper.compile(work, piper.Strategy(piper.Mesh(pp=1), halves))
            ours, torchs, off = list[float](), list[float](), 0.0
            for _ in range(ROUNDS):
                run = piper.execute(compiled, steps=count, launcher="processes", pool=pool)
                plain = MasterLoop(work, here)
                seconds = [plain.step() for _ in range(count)]
                ours.append(run.period_s or math.nan)
                torchs.append(median(seconds[WARMUP_STEPS:]))
                losses = zip(run.losses, plain.losses, strict=True)
                off = max(off, *(100 * abs(a / b - 1) for a, b in losses))
            title = f"{name}: losses of {count} steps against torch"
            yield Row("mixed", title, off, "% apart", goal=LOSSES)
            note = "plain torch: copies in bfloat16, a fused AdamW of masters in float32"
            title = f"bfloat16 and masters, {name}"
            yield pairs_row("speed", f"{title}: torch/ours", torchs, ours, SPEED, note)
            planned = on_device(compiled.plan, device)
            yield peak_row("memory", title, planned, run.peak_bytes)


class MasterLoop:
    """Train a job in plain torch: copies of parameters in bfloat16, masters and summed gradients in float32."""

    def __init__(self, work: piper.Job, device: torch.device, microbatches: int = 4) -> None:
        self.losses: list[float] = []
        self._work, self._device, self._microbatches = work, device, microbatches
        torch.manual_seed(work.seed)
        self._model = work.model().to(device)
        self._masters = [nn.Parameter(p.detach().clone()) for p in self._model.parameters()]
        for p in self._model.parameters():
            p.data = p.data.to(torch.bfloat16)
        self._names = [name for name, _ in self._model.named_parameters()]
        self._optimizer = work.optimizer(list(zip(self._names, self._masters, strict=True)))
        for group in self._optimizer.param_groups:
            group["fused"] = True

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients of the step that was summed up last, by parameter."""
        return {
            n: m.grad for n, m in zip(self._names, self._masters, strict=True) if m.grad is not None
        }

    def step(self) -> float:
        """Train one step, and return its seconds."""
        begin = time.perf_counter()
        found = self.sum_up()
        self._optimizer.step()
        with torch.no_grad():
            for p, master in zip(self._model.parameters(), self._masters, strict=True):
                p.copy_(master)
        self.losses.append(torch.stack(found).double().mean().item())
        return time.perf_counter() - begin

    def sum_up(self) -> list[torch.Tensor]:
        """Sum up the gradients of a step, and return the losses of its microbatches."""
        found, m = list[torch.Tensor](), self._microbatches
        size = self._work.global_batch // m
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        for mb in range(m):
            inputs, targets = self._work.batch(len(self.losses), range(mb * size, (mb + 1) * size))
            one = self._work.loss(
                self._model(inputs.to(self._device)).float(), targets.to(self._device)
            )
            (one / m).backward()
            found.append(one.detach())
            for p, master in zip(self._model.parameters(), self._masters, strict=True):
                assert p.grad is not None and master.grad is not None
                master.grad.add_(p.grad)
                p.grad = None
        return found


# --- recomputation


def policies_of(
    config: DecoderConfig, rows: int = ROWS
) -> Iterator[tuple[str, piper.Job, piper.Strategy]]:
    """Yield a job without recomputation and under each policy, with the strategy."""
    work = models.job(config, global_batch=rows)
    plain = (piper.split(piper.where(), microbatches=4),)
    yield "all", work, piper.Strategy(piper.Mesh(pp=1), plain)
    for keep in POLICIES:
        yield (
            keep,
            work,
            piper.Strategy(piper.Mesh(pp=1), (*plain, piper.recompute(piper.where(), keep=keep))),
        )


def peaks(device: str, sizes: Mapping[str, DecoderConfig], rows: int = ROWS) -> Iterator[Row]:
    """Compare the peak of each policy with what the allocator was asked for; less is kept than without any."""
    with using(device), Pool(1) as pool:
        for name, config in sizes.items():
            held: dict[str, int] = {}
            for keep, work, strategy in policies_of(config, rows):
                compiled = piper.compile(work, strategy)
                run = piper.execute(compiled, steps=2, launcher="processes", pool=pool)
                held[keep] = run.peak_bytes[0]
                planned = on_device(compiled.plan, device)
                yield peak_row("recompute", f"{name}, keep={keep}", planned, run.peak_bytes)
            share, title = held["inputs"] / held["all"], f"{name}: peak with inputs over all"
            yield Row("recompute", title, share, "ratio", goal=Goal("below", 1))


def overheads(
    device: str, cluster: Cluster, sizes: Mapping[str, DecoderConfig] = RECOMPUTED, rows: int = ROWS
) -> Iterator[Row]:
    """Compare by how much policies lengthen a step with what a profile says, in points of per cent."""
    with using(device), Pool(1) as pool:
        for name, config in sizes.items():
            took: dict[str, tuple[float, float]] = {}
            for keep, work, strategy in policies_of(config, rows):
                compiled = piper.compile(work, strategy)
                costs = piper.profile(
                    work, strategy, rows=[compiled.plan.rows], repeats=5, pool=pool
                )
                predicted = piper.simulate(compiled.plan, cluster, costs=costs).period_s
                run = piper.execute(
                    compiled, steps=WARMUP_STEPS + STEPS, launcher="processes", pool=pool
                )
                took[keep] = predicted, run.period_s or math.nan
            for keep in POLICIES:
                more = [100 * (a / b - 1) for a, b in zip(took[keep], took["all"], strict=True)]
                note = f"predicted {more[0]:.1f} %, measured {more[1]:.1f} %"
                apart, title = abs(more[0] - more[1]), f"{name}, keep={keep}: longer steps"
                yield Row("predicted", title, apart, "points apart", goal=OVERHEAD, note=note)


# --- checkpoints beside training


@cache
def wide_rows(tokens: int, width: int) -> torch.Tensor:
    """Return random numbers, made once per process."""
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(1))


def wide_batch(
    tokens: int, width: int, step: int, rows: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same rows in every step, so that data cost nothing."""
    x = wide_rows(tokens, width)[rows.start : rows.stop]
    return x, x


class WideLayers(nn.Module):
    """Be a stack of square matrices, whose state is large beside what a step holds."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def saved(device: str, nbytes: int, width: int = WIDTH, tokens: int = TOKENS) -> Iterator[Row]:
    """Save `nbytes` of state beside training, and compare the steps meanwhile with those without.

    Copies are made on a stream beside compute, and a thread writes them: the step after a save shows what blocked it.
    The first save, which also makes the pinned memory, is not counted; it has ended before the steps that are compared.
    """
    layers = max(
        1, nbytes // (12 * width * width)
    )  # a parameter and two numbers of AdamW, of 4 bytes
    work = piper.Job(
        partial(WideLayers, layers, width),
        partial(wide_batch, tokens, width),
        nn.functional.mse_loss,
        adamw,
        global_batch=tokens,
        init="seeded",
        precision=piper.Precision(params="float32"),
    )
    compiled = piper.compile(
        work, piper.Strategy(piper.Mesh(pp=1), (piper.split(piper.where(), microbatches=2),))
    )
    title = f"{12 * layers * width * width / 2**30:.2f} GiB of state"
    with (
        using(device),
        Pool(1) as pool,
        tempfile.TemporaryDirectory(prefix="piper-gpu-check-") as folder,
    ):
        run = partial(piper.execute, compiled, launcher="processes", pool=pool, memory=False)
        plain_s = median(run(steps=WARMUP_STEPS + STEPS).step_s[WARMUP_STEPS:])
        begin = time.perf_counter()
        run(steps=1, checkpoint=piper.Checkpoints(Path(folder, "one"), asynchronous=False))
        every = max(3 * STEPS, math.ceil(1.5 * (time.perf_counter() - begin) / plain_s))
        checkpoint = piper.Checkpoints(Path(folder, "two"), every=every, keep=1)
        times = run(steps=2 * every + STEPS, checkpoint=checkpoint).step_s
    before, first = times[2 * every - STEPS + 1 : 2 * every], times[2 * every]
    meanwhile = times[2 * every + 1 : 2 * every + STEPS]
    note = f"a step takes {1e3 * median(before):.1f} ms"
    blocked = 1e3 * (first - median(before))
    name = f"{title}: the step after a save is longer by"
    yield Row("checkpoint", name, blocked, "ms", goal=BLOCKED, note=note)
    name = f"{title}: steps while it is written / those just before"
    yield pairs_row("checkpoint", name, meanwhile, before, BESIDE, note)
