"""Faults before and beside a plan: what a front door could do wrong with a job. tests/faults/mutants.py tries them.

Each runs a job wrongly and returns the run with what one device computes for the job; None where a case offers no
place.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import piper
from piper_runtime.launch.ground.result import Run
from piper_runtime.launch.running.run import execute
from piper_runtime.rank.job.job import Job
from tests.helpers import compositions, models, parity
from tests.helpers.compositions import Composition

Judged = tuple[Run, parity.Reference]
JobFault = Callable[[Composition], Judged | None]


def _run(c: Composition, job: Job) -> Run:
    """A job with the plan and the code of a composition."""
    plan = compositions.compiled(c).plan
    code = compositions.code_of(c, plan)
    return execute(plan, code, job, steps=parity.STEPS, launcher="inline", gradients=True)


def _truth(c: Composition, job: Job) -> parity.Reference:
    return parity.reference(job, replicas=c.dp, microbatches=c.microbatches)


def _rounded(tensor: Any) -> Any:
    """A tensor that has been float32 on its way."""
    return (
        tensor.float().to(tensor.dtype)
        if isinstance(tensor, Tensor) and tensor.is_floating_point()
        else tensor
    )


def checkpoint_cast(c: Composition) -> Judged | None:
    """A checkpoint in float64 is loaded into a model in float32, and cast afterwards."""
    job = compositions.job_of(c)
    generator = torch.Generator().manual_seed(1)
    state = job.model().state_dict()
    wide = {
        n: t + 1e-3 * torch.randn(t.shape, generator=generator, dtype=torch.float64)
        for n, t in state.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        good, bad = Path(folder, "good.pt"), Path(folder, "bad.pt")
        torch.save(wide, good)
        torch.save({n: _rounded(t) for n, t in wide.items()}, bad)
        return _run(c, replace(job, init=bad)), _truth(c, replace(job, init=good))


def batch_cast(c: Composition) -> Judged | None:
    """A batch in float64 is float32 on its way."""
    job = compositions.job_of(c)
    inputs, targets = job.batch(0, range(1))
    if not any(
        isinstance(t, Tensor) and t.is_floating_point()
        for t in pytree.tree_leaves((inputs, targets))
    ):
        return None

    def fine(step: int, rows: range) -> Any:
        return pytree.tree_map(
            lambda t: t.double() / 3 if t.is_floating_point() else t, job.batch(step, rows)
        )

    def rough(step: int, rows: range) -> Any:
        return pytree.tree_map(_rounded, fine(step, rows))

    return _run(c, replace(job, batch=rough)), _truth(c, replace(job, batch=fine))


def alias_apart(c: Composition) -> Judged | None:
    """Two names of one parameter are trained apart."""
    job = compositions.job_of(c)
    if not any(p.tied for p in compositions.captured(c.model).program.params):
        return None

    def apart() -> nn.Module:
        model = job.model()
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    setattr(
                        module,
                        name,
                        nn.Parameter(parameter.detach().clone(), parameter.requires_grad),
                    )
        return model

    split = replace(job, model=apart)
    compiled = piper.compile(split, compositions.strategy_of(replace(c, pp=1, schedule="default")))
    run = piper.execute(
        compiled, steps=parity.STEPS, launcher="inline", memory=False, gradients=True
    )
    return run, _truth(c, job)


def stale_capture(c: Composition) -> Judged | None:
    """The code is that of another model with the same parameters, which was captured before."""
    job = compositions.job_of(c)
    if c.model != "gpt_untied":
        return None
    return _run(c, replace(job, model=Louder)), _truth(c, replace(job, model=Louder))


class Louder(models.TinyGPT):
    """A model with the parameters of "gpt_untied" that computes something else."""

    def __init__(self) -> None:
        super().__init__(tied=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return 2 * super().forward(tokens)


JOBS: tuple[JobFault, ...] = (checkpoint_cast, batch_cast, alias_apart, stale_capture)
