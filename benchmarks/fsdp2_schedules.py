"""Compare gradients under pipeline schedules with sharded parameters: torch's FSDP2 under its own runtime, and a plan.

`python benchmarks/fsdp2_schedules.py` writes docs/fsdp2.md. Two stages or more on two devices, each twice (pp=2 x dp=2),
gloo, float64, one step: the gradient of every parameter against that of plain PyTorch on one device. torch's side is
`fully_shard(reshard_after_forward=True)` of every layer and stage under `torch.distributed.pipelining`; ours is the
recipe of the same name with `data_parallel(zero=3)`.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, sys.path begins with this folder and not with the root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

import piper
from benchmarks.step_kinds import PIPELINES, WORLD

WIDTH, LAYERS, MICROBATCHES, ROWS = 8, 8, 8, 2
REPLICAS = 2
BATCH = MICROBATCHES * ROWS * REPLICAS
WRONG = 1e-9
PAGE = Path(__file__).resolve().parent.parent / "docs" / "fsdp2.md"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of the rows."""
    both = torch.randn(2, BATCH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return both[0, rows.start : rows.stop], both[1, rows.start : rows.stop]


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def model() -> Net:
    """Return the model on one device."""
    torch.manual_seed(0)
    return Net().double()


def expected() -> dict[str, Tensor]:
    """Return the gradients of one device."""
    net = model()
    x, y = batch(0, range(BATCH))
    nn.functional.mse_loss(net(x), y).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def ours(kind: str) -> dict[str, Tensor]:
    """Return the gradients of a plan whose replicas share all states."""
    job = piper.Job(model, batch, nn.functional.mse_loss, sgd, global_batch=BATCH, precision=piper.Precision(params="float64"))
    recipe = PIPELINES[kind].recipe(pp=WORLD, microbatches=MICROBATCHES)
    strategy = piper.Strategy(piper.Mesh(pp=WORLD, dp=REPLICAS), (*recipe, *piper.recipes.data_parallel(zero=3)))
    run = piper.execute(piper.compile(job, strategy), steps=1, launcher="inline", gradients=True)
    return dict(run.gradients[0])


def torchs(kind: str, rank: int) -> dict[str, Tensor | None]:
    """Return the gradients that this rank has of its stages; None for one that is missing."""
    pipeline, net = PIPELINES[kind], model()
    mesh = init_device_mesh("cpu", (WORLD, REPLICAS), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    indices, size = pipeline.stages_of(pp), LAYERS // pipeline.stages
    parts = [nn.Sequential(*net.layers[i * size : (i + 1) * size]) for i in indices]
    for part in parts:
        for layer in part:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=True)
        fully_shard(part, mesh=mesh["dp"], reshard_after_forward=True)
    group, device = mesh["pp"].get_group(), torch.device("cpu")
    stages = [PipelineStage(part, i, pipeline.stages, device, group=group) for part, i in zip(parts, indices, strict=True)]
    schedule = pipeline.schedule(stages, MICROBATCHES, nn.functional.mse_loss)
    x, y = batch(0, range(dp * BATCH // REPLICAS, (dp + 1) * BATCH // REPLICAS))
    given: dict[str, Any] = {"target": y} if pipeline.stages - 1 in indices else {}
    schedule.step(*[x] * (0 in indices), **given)
    out: dict[str, Tensor | None] = {}
    for part, i in zip(parts, indices, strict=True):
        for name, p in part.named_parameters():
            layer, _, rest = name.partition(".")
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            out[f"layers.{i * size + int(layer)}.{rest}"] = grad
    return out


@dataclass(frozen=True)
class Compared:
    """Hold one side of one schedule: the largest relative error of a gradient, and how many are missing."""

    error: float
    missing: int

    def __str__(self) -> str:
        text = "equal" if self.error <= WRONG else f"wrong, by up to {self.error:.2g}"
        return f"{text}; {self.missing} missing" if self.missing else text


def compared(found: dict[str, Tensor | None]) -> Compared:
    """Compare gradients with those of one device."""
    wanted = expected()
    errors = [float((g - wanted[n]).norm() / wanted[n].norm()) for n, g in found.items() if g is not None]
    return Compared(max(errors, default=0.0), sum(g is None for g in found.values()))


def _rank(kind: str, rank: int, store: str, queue: Queue[Any]) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD * REPLICAS), rank=rank, world_size=WORLD * REPLICAS)
    try:
        queue.put(compared(torchs(kind, rank)))
    except Exception as error:  # what torch says is a result too
        queue.put(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    dist.barrier()
    dist.destroy_process_group()


def of_torch(kind: str) -> Compared | str:
    """Return torch's side: the worst rank, or what it raises."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="piper-fsdp2-") as folder:
        queue: Any = context.Queue()
        ranks = [context.Process(target=_rank, args=(kind, r, f"{folder}/store", queue)) for r in range(WORLD * REPLICAS)]
        for process in ranks:
            process.start()
        try:
            found = [queue.get(timeout=300) for _ in ranks]
        finally:
            for process in ranks:
                process.join(20)
                process.kill()
    texts = [f for f in found if isinstance(f, str)]
    return texts[0] if texts else Compared(max(f.error for f in found), sum(f.missing for f in found) // REPLICAS)


HEAD = f"""# Gradients with sharded parameters under pipelines

torch's `fully_shard(reshard_after_forward=True)` under its own pipeline runtime, beside `data_parallel(zero=3)` of the
same schedule: the gradients of one step against those of one device. pp=2 x dp=2 over gloo, float64, {LAYERS} layers,
{MICROBATCHES} microbatches, torch {torch.__version__.split("+")[0]}. An error is the largest of a parameter, relative to
the norm of its gradient. Nothing is raised where torch's gradients are wrong or missing.

`python benchmarks/fsdp2_schedules.py` writes this page.

| schedule | torch FSDP2 | Piper, zero=3 |
|---|---|---|
"""


def main() -> None:
    """Write the page."""
    lines = [f"| {kind} | {of_torch(kind)} | {compared(dict(ours(kind)))} |\n" for kind in PIPELINES]
    PAGE.write_text(HEAD + "".join(lines), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
