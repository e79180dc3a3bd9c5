"""Share what the checks of a CUDA device need: a device's facts, rows as text, pools of joined ranks, predictions."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

import piper
from benchmarks.measure import Goal, Row
from piper_ir.plan.plan import Plan
from piper_runtime.launch import WARMUP_STEPS, Pool
from piper_runtime.transport import SHARED_DEVICE

if TYPE_CHECKING:  # other checks run without the simulator's packages
    from piper_simulator import Cluster

EQUAL = Goal("below", 1e-9)
FORMULA, PROFILE, MEMORY = Goal("below", 25), Goal("below", 10), Goal("below", 3)
"""The error in per cent that a prediction of a step may have, by formula and by profile, and one of the peak."""
STEPS = 8


def device_facts() -> dict[str, str]:
    """Return what else a figure depends on."""
    facts = torch.cuda.get_device_properties(0)
    return {
        "device": f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB",
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "tf32": str(torch.backends.cuda.matmul.allow_tf32),
    }


def line(row: Row) -> str:
    """Return one row for people."""
    between = (
        f" [{row.low:.4g}, {row.high:.4g}]" if row.low is not None and row.high is not None else ""
    )
    goal = f"  goal {row.goal} {'met' if row.met else 'MISSED'}" if row.goal is not None else ""
    return f"{row.section:9} {row.name:72} {row.value:12.5g} {row.unit}{between}{goal}  {row.note}"


def as_json(row: Row) -> dict[str, object]:
    """Return one row for programs."""
    return asdict(row) | {"goal": None if row.goal is None else str(row.goal), "met": row.met}


@contextmanager
def joined_pool(world: int, how: str) -> Iterator[Pool]:
    """Open a pool whose ranks are joined by `how`, "gloo" or "nccl" (`SHARED_DEVICE` in the environment).

    There are fewer devices than ranks. It holds also for workers that are started again inside of the block, after a
    failure.
    """
    with patch.dict(os.environ, {SHARED_DEVICE: how}), Pool(world) as workers:
        yield workers


def difference(run: piper.Run, alone: piper.Run) -> float:
    """Return the largest relative difference of their losses and of the tensors at their ends."""
    tensors, expected = run.state_dict(), alone.state_dict()
    losses = [abs(a / b - 1) for a, b in zip(run.losses, alone.losses, strict=True)]
    return max(*losses, *(float((tensors[n] - t).norm() / t.norm()) for n, t in expected.items()))


def peak_errors(plan: Plan, asked: Mapping[int, int]) -> tuple[int, int, str]:
    """Return planned and measured bytes of the rank whose peak is furthest from its plan, and both in words."""
    planned = {rank: role.peak_bytes for role in plan.roles for rank in role.ranks}
    rank = max(asked, key=lambda r: abs(planned[r] / asked[r] - 1))
    note = f"planned {planned[rank]} bytes, {asked[rank]} were asked for, on rank {rank}"
    return planned[rank], asked[rank], note


def predicted(
    title: str, compiled: piper.Compiled, cluster: Cluster, costs: piper.Costs, pool: Pool
) -> Iterator[Row]:
    """Predict a plan by formula and from a profile, then run it: errors of step and peak, predicted / measured - 1."""
    run = piper.execute(compiled, steps=WARMUP_STEPS + STEPS, launcher="processes", pool=pool)
    assert run.period_s is not None
    for how, known, goal in (("formula", None, FORMULA), ("profile", costs, PROFILE)):
        simulated = piper.simulate(compiled.plan, cluster, costs=known)
        sources = simulated.summary()["sources"].items()
        shares = ", ".join(f"{name} {share:.0%}" for name, share in sources)
        times = f"predicted {1e3 * simulated.period_s:.2f} ms/step ({shares})"
        note = "; ".join([f"{times}, measured {1e3 * run.period_s:.2f}", *simulated.notes])
        error = 100 * (simulated.period_s / run.period_s - 1)
        yield error_row("predicted", f"{title}: step, by {how}", error, goal, note)
    planned, peak = max(simulated.peak_bytes), max(run.peak_bytes.values())
    taken = simulated.device_bytes[0] / 2**20
    note = f"predicted {planned} bytes, {peak} were asked for; {taken:.0f} MiB with the allocator"
    yield error_row("predicted", f"{title}: peak memory", 100 * (planned / peak - 1), MEMORY, note)


def error_row(section: str, name: str, error: float, goal: Goal, note: str) -> Row:
    """Return an error in per cent, whose goal is for its size."""
    return Row(section, name, error, "% error", goal=goal, note=note, judged=abs(error))
