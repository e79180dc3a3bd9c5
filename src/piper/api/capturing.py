"""Keep captures of models, so that jobs of the same content share one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from piper_ir.program import Program
from piper_ir.tools import no_garbage_collection

if TYPE_CHECKING:
    from piper.api.content import Content
    from piper_compiler.capture import Captured
    from piper_runtime import Job


MOST_CAPTURES = 16
"""The number of captured models that are kept; the oldest goes first."""


_CAPTURES: dict[CaptureKey, Captured] = {}


_BATCHES: dict[Content, str] = {}


@dataclass(frozen=True)
class CaptureKey:
    """Hold everything that a capture depends on; jobs with equal keys share one capture.

    Attributes:
        content: Code and values of the model and of the loss.
        batch: Structure, shapes and dtypes of a batch.
        precision: The dtype of parameters.
        default_dtype: torch's default dtype.
    """

    content: Content
    batch: str
    precision: str
    default_dtype: str


def program_at(captured: Captured, rows: int) -> Program:
    """Return the program for microbatches of `rows` rows.

    It has affine sizes, after a check that the captured path holds at that many rows. One row has a program of its own,
    because sizes are not affine there. Raises CaptureError where the model takes another path.
    """
    from piper_compiler.capture import check_rows

    if rows == 1:
        return captured.bind(1)
    check_rows(captured.forward, rows)
    return captured.program


def captured_job(job: Job) -> Captured:
    """Return the capture of a job's model; jobs that differ only in what capture does not see share one."""
    key = capture_key(job)
    if key not in _CAPTURES:
        if len(_CAPTURES) == MOST_CAPTURES:
            _CAPTURES.pop(next(iter(_CAPTURES)))
        _CAPTURES[key] = _capture(job)
    return _CAPTURES[key]


def capture_key(job: Job) -> CaptureKey:
    """Return the key of a job's capture.

    A batch counts by the looks of two of its rows. The batch function is called once for each content that it has.
    """
    import torch

    from piper.api.content import content_of

    content = content_of(job.batch)
    if content not in _BATCHES:
        if len(_BATCHES) == MOST_CAPTURES:
            _BATCHES.pop(next(iter(_BATCHES)))
        _BATCHES[content] = _looks(job)
    return CaptureKey(content_of(job.model, job.loss), _BATCHES[content], job.precision.params, str(torch.get_default_dtype()))


def _looks(job: Job) -> str:
    """Return the structure, shapes and dtypes of the rows that a capture asks for, without the number of rows."""
    import torch
    from torch.utils import _pytree as pytree

    from piper_compiler.capture import ASKED_ROWS
    from piper_runtime.rank import call_batch

    rows = range(min(ASKED_ROWS, job.global_batch))
    leaves, structure = pytree.tree_flatten(call_batch(job.batch, 0, rows))
    looks = [
        f"{leaf.dtype} {tuple(leaf.shape[1:])} {leaf.shape[:1] == (len(rows),)}" if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    ]
    return f"{structure} {looks}"


def _capture(job: Job) -> Captured:
    from piper_compiler.capture import capture
    from piper_runtime.rank import call_batch

    batch = partial(call_batch, job.batch, 0)
    with no_garbage_collection():
        return capture(job.model, batch, job.loss, dtype=job.precision.dtype, most=job.global_batch)
