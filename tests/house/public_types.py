"""Say which types the public names have for an editor or a type checker; `make check` runs mypy on this file.

Nothing here is executed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, assert_type

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import piper
from piper_compiler import Directive
from piper_ir.plan.plan import Plan


def evaluated(data: Dataset[Any]) -> piper.Job:
    def accuracy(output: Tensor, targets: Tensor) -> Tensor:
        return (output.argmax(-1) == targets).double().mean()

    return piper.Job(
        lambda: nn.Linear(2, 2),
        piper.from_dataset(data),
        nn.functional.cross_entropy,
        lambda named: torch.optim.SGD([p for _, p in named]),
        global_batch=8,
        metrics={"accuracy": accuracy, "perplexity": math.exp},
        eval_data=data,
        eval_every=100,
    )


def used(job: piper.Job, costs: piper.Costs) -> None:
    strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=4))
    compiled = piper.compile(job, strategy, costs=costs)
    assert_type(piper.recipes.one_f_one_b(pp=2, microbatches=4), tuple[Directive, ...])
    assert_type(piper.recipes.one_f_one_b(rows=4), tuple[Directive, ...])
    assert_type(piper.where(stage=0), piper.Where)
    assert_type(compiled, piper.Compiled)
    assert_type(compiled.plan, Plan)
    assert_type(piper.simulate(compiled.plan, "h100x8"), piper.Simulation)
    assert_type(piper.execute(compiled, steps=1), piper.Run)
    assert_type(piper.why(compiled.plan, "h100x8"), piper.Why)
    assert_type(piper.__version__, str)
    assert_type(job.eval_every, int | None)
    assert_type(compiled.evaluation, piper.Compiled | None)
    assert_type(piper.execute(compiled, steps=1).evaluations, Mapping[int, Mapping[str, float]])
    misspelt = piper.Jbo  # type: ignore[attr-defined]  # there is no such name, and a type checker is to say so
    assert misspelt


def axes_by_name() -> None:
    """One axis is named by a text, and one directive stands alone."""
    one = piper.replicate(piper.where(), over="dp", shard={"optim": "dp", "grads": ("dp",)})
    piper.Strategy(piper.Mesh(dp=2), one)
    piper.Strategy(piper.Mesh(dp=2), piper.recipes.data_parallel(over="dp", shard={"optim": "dp"}))
    piper.replicate(piper.where(), over=1)  # type: ignore[arg-type]  # a user's mistake, which mypy must see


def refused(job: piper.Job, compiled: piper.Compiled) -> None:
    """What an editor marks: words that are not known, and what must be given."""
    piper.execute(compiled, steps=1, launcher="slurm")  # type: ignore[arg-type]  # an unknown word
    piper.execute(compiled, steps=1, on_loss="wait")  # type: ignore[arg-type]  # an unknown word
    piper.execute(compiled, steps=1, gradient=True)  # type: ignore[call-arg]  # it is `gradients`
    piper.execute(compiled, steps=1, gradients=True, spares=1)
    piper.shard(piper.where(), over="cp", attention="flash")  # type: ignore[arg-type]  # heads, ring or gather
    piper.shard(piper.where(), stream="columns")  # type: ignore[arg-type]  # tokens, rows, or nothing
    piper.recipes.gpipe(pp=2, microbatch=4)  # type: ignore[call-overload]  # it is `microbatches`
    piper.replicate(piper.where(), zero=4)  # type: ignore[arg-type]  # 0 to 3 exist
    piper.Job(lambda: nn.Linear(2, 2), job.batch, None, job.optimizer, 8, loss_over="row")  # type: ignore[call-overload]  # no word
    piper.Job(lambda: nn.Linear(2, 2), job.batch)  # type: ignore[call-overload]  # optimizer and global_batch are missing
    piper.Job(lambda: nn.Linear(2, 2), job.batch, optimizer=job.optimizer)  # type: ignore[call-overload]  # global_batch is
    piper.Job(
        lambda: nn.Linear(2, 2), job.batch, optimizer=job.optimizer, global_batch=8
    )  # the model's own loss
