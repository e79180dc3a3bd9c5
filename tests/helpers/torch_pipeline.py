"""One rank of torch's own pipeline runtime, on a schedule of ours: `python torch_pipeline.py RANK STORE FILE...`.

What torch needs: a process group; per stage of this rank a PipelineStage; the loss of a microbatch, whose mean over
microbatches the runtime makes by dividing gradients at REDUCE_GRAD (scale_grads); `_load_csv`, which adds the
communication to a compute-only file ("compute_only") or takes it from a lowered one ("compute_comms") and finds from
the rows which stage is where; inputs on every rank, of which those of the first stage count, and targets, of which
those of the last do.
"""

from __future__ import annotations

import re
import sys
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

WIDTH, ROWS, RANKS = 6, 2, 2


def model(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(stages)]


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    both = torch.randn(
        2,
        ROWS * microbatches,
        WIDTH,
        generator=torch.Generator().manual_seed(1),
        dtype=torch.float64,
    )
    return both[0], both[1]


def on_one_device(stages: int, microbatches: int) -> list[list[Tensor]]:
    """The gradients of each stage's parameters."""
    parts = model(stages)
    x, y = batch(microbatches)
    nn.functional.mse_loss(nn.Sequential(*parts)(x), y).backward()
    return [[p.grad for p in part.parameters()] for part in parts]


def run(rank: int, path: str, lowered: bool) -> float:
    """The largest difference between a gradient of this rank and the same on one device."""
    with open(path) as file:
        forwards = [
            [(int(s), int(mb)) for s, mb in re.findall(r"(\d+)F(\d+)", line)] for line in file
        ]
    stages, microbatches = (1 + max(pair[k] for row in forwards for pair in row) for k in (0, 1))
    mine = sorted({stage for stage, _ in forwards[rank]})
    parts = model(stages)
    own = [PipelineStage(parts[s], s, stages, torch.device("cpu")) for s in mine]
    schedule = _PipelineScheduleRuntime(own, microbatches, loss_fn=nn.functional.mse_loss)
    schedule._load_csv(path, format="compute_comms" if lowered else "compute_only")
    x, y = batch(microbatches)
    schedule.step(x, target=y)
    expected = on_one_device(stages, microbatches)
    return max(
        float((p.grad - g).abs().max())
        for s in mine
        for p, g in zip(parts[s].parameters(), expected[s], strict=True)
    )


def main(rank: int, store: str, paths: list[str]) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    for path in paths:
        print(path, run(rank, path, "lowered" in path), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
