"""Faults in what a backward and a batch are taken to mean: auxiliary gradients, casts, and tensors in one memory.

Each compiles a job of its own with a check or a rule of the compiler left out, and returns its run with what plain
PyTorch computes on the whole batch. tests/faults/mutants.py tries them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch.nn.functional as F
from torch import Tensor

import piper
from piper import Job, Mesh, Precision, Strategy
from piper.api.captures import capturing
from piper_capture.module import model
from piper_capture.steps.linearity import Auxiliary
from piper_capture.store import assemble
from piper_capture.trace import dynamo
from tests.faults.job_faults import JobFault, Judged
from tests.helpers import parity
from tests.helpers.compositions import Composition
from tests.parity import test_auxiliary_gradients as own_backwards
from tests.parity import test_exact_batches as batches

PARTS = Strategy(Mesh(), [piper.split(piper.where(), microbatches=4)])


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Capture every model anew."""
    made = mock.patch.object(capturing, "kept_or_made", lambda file, what, make: make())
    with mock.patch.dict(capturing._CAPTURES, clear=True), made:
        yield


def judged(job: Job, strategy: Strategy = PARTS) -> Judged:
    """Run a job whose batch is in several parts; the truth is the whole batch in one.

    In half precision the sums of a pair have gradients that are divided last, as a plan does, for equal rounding.
    """
    with nothing_kept():
        compiled = piper.compile(job, strategy)
    run = piper.execute(
        compiled, steps=parity.STEPS, launcher="inline", memory=False, gradients=True
    )
    return run, parity.reference(job, whole=job.precision.compute is None)


def _place(c: Composition, precision: str = "float64") -> bool:
    """Return whether this is the case whose tolerance these jobs are compared with."""
    return c.model == "gpt" and c.precision == precision


def _taken_for(kind: Any) -> Any:
    """Let every backward that is not linear be of another kind."""
    found = assemble.auxiliary

    def auxiliary(*call: Any) -> Auxiliary | None:
        one = found(*call)
        return one if one is None else None if kind is None else replace(one, kind=kind)

    return mock.patch.object(assemble, "auxiliary", auxiliary)


def mean_each_time(c: Composition) -> Judged | None:
    """An auxiliary gradient that is a mean counts once per microbatch."""
    with _taken_for(None):
        return (
            judged(own_backwards.job(own_backwards.mean_square, F.mse_loss)) if _place(c) else None
        )


def sum_as_mean(c: Composition) -> Judged | None:
    """An auxiliary gradient that is a sum over rows is divided by the microbatches."""
    with _taken_for("mean"):
        return (
            judged(own_backwards.job(own_backwards.sum_of_squares, F.mse_loss))
            if _place(c)
            else None
        )


def balance_as_mean(c: Composition) -> Judged | None:
    """The gradient of a product of means is taken for a mean over rows."""
    with _taken_for("mean"):
        return judged(own_backwards.job(own_backwards.balanced, F.mse_loss)) if _place(c) else None


def mask_as_mean(c: Composition) -> Judged | None:
    """The gradient of a mean over some rows is taken for one over all of them."""
    with _taken_for("mean"):
        return (
            judged(own_backwards.job(own_backwards.masked_mean, F.mse_loss)) if _place(c) else None
        )


def norm_by_microbatch(c: Composition) -> Judged | None:
    """A bound of a gradient's norm is one of each microbatch."""
    with _taken_for(None):
        return (
            judged(own_backwards.job(own_backwards.BoundedNorm.apply, F.mse_loss))
            if _place(c)
            else None
        )


def _cast(c: Composition, *names: str) -> Judged | None:
    """Run the job of exact targets with these among the tensors that are cast."""
    if not _place(c, "mixed"):
        return None
    exact = dynamo.exact_tensors
    job = Job(
        batches.Identities,
        batches.uneven,
        batches.masked,
        batches.still,
        global_batch=4,
        precision=batches.TWO_KINDS,
    )
    with mock.patch.object(dynamo, "exact_tensors", lambda *call: exact(*call) - set(names)):
        return judged(job, batches.ONE)


def targets_cast(c: Composition) -> Judged | None:
    """Targets are rounded to the dtype of computing."""
    return _cast(c, "targets.wanted")


def masks_cast(c: Composition) -> Judged | None:
    """Weights of a loss are rounded to the dtype of computing."""
    return _cast(c, "targets.mask")


def _masking(begin: int) -> Job:
    """Return a job whose targets begin in that column of a tensor, of which the inputs are the first two."""

    def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
        both = batches.WHOLE.double()[rows.start : rows.stop] / 24 + step
        return both[..., :2], both[..., begin : begin + 2]

    return Job(
        batches.Masking,
        batch,
        F.mse_loss,
        own_backwards.sgd,
        global_batch=4,
        precision=Precision("float64"),
    )


def alias_copied(c: Composition) -> Judged | None:
    """One tensor that is input and target is loaded twice, and forward changes one of them."""
    with mock.patch.object(assemble, "check_batch", lambda *_: None):
        return judged(_masking(0), batches.ONE) if _place(c) else None


def views_copied(c: Composition) -> Judged | None:
    """Two views of one memory are loaded apart, and forward changes one of them."""
    with mock.patch.object(model, "sharing_memory", lambda _: ()):
        return judged(_masking(1), batches.ONE) if _place(c) else None


BACKWARDS: tuple[JobFault, ...] = (
    mean_each_time,
    sum_as_mean,
    balance_as_mean,
    mask_as_mean,
    norm_by_microbatch,
    targets_cast,
    masks_cast,
    alias_copied,
    views_copied,
)
