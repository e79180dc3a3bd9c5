"""Keep captures of models, so that jobs of the same content share one."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from piper.api.captures.kept_captures import forget, kept_or_made, write_first
from piper_compiler import ASKED_FOR, CaptureRequest
from piper_compiler.directives.partition import before_empty
from piper_ir.ground.errors import CaptureError
from piper_ir.program.ops import CHECKPOINT, Step
from piper_ir.program.program import Program
from piper_ir.tools import no_garbage_collection, room_for_frames, working

if TYPE_CHECKING:
    import torch

    from piper_capture import Captured, Traced
    from piper_runtime import Job


MOST_CAPTURES = 16
"""The number of captured models that are kept; the oldest goes first."""


_CAPTURES: dict[CaptureKey, Traced] = {}

_HELD: list[dict[tuple[object, ...], tuple[Job, Traced]]] = []
"""The captures by the objects of their jobs, while `captured_once` holds them, with the jobs that have these ids."""


@dataclass(frozen=True)
class CaptureKey:
    """Hold a digest of everything that a capture depends on; jobs with equal keys share one capture.

    Attributes:
        content: a digest of the module that the model function makes, of the loss, the batch and torch's settings.
        file: the name of the capture's file, which depends on the places of the user's code, too; None if another
            process may take the same code for something else.
    """

    content: str
    file: str | None = field(default=None, compare=False)


def program_at(
    captured: Captured, rows: int, runs: Mapping[str, Collection[Step]] | None = None
) -> Program:
    """Return the program for microbatches of `rows` rows, of whose chunks the steps `runs` run (see `Captured.bind`).

    It has affine sizes, after a check that the captured path holds at that many rows. One row has a program of its own,
    because sizes are not affine there, and so has any number of rows under Inductor's kernels. Raises CaptureError if
    the model takes another path; the capture is not used again then.
    """
    from piper_capture import check_rows

    try:
        if not captured.is_affine(rows):
            return captured.bind(rows, runs)
        check_rows(captured.forward, rows)
    except CaptureError:
        _remove(captured)
        raise
    return captured.program


def _remove(captured: Traced | Captured) -> None:
    """Let go of a capture that must not be used again, and of its file."""
    for key in [key for key, kept in _CAPTURES.items() if kept.forward is captured.forward]:
        forget(_CAPTURES.pop(key), remove=True)


def rewritten(
    traced: Traced | Captured, request: CaptureRequest, rows: int | None = None
) -> Captured:
    """Return the capture that is cut at the layers, divided among devices and recomputed as a strategy asks.

    Regions that the model itself puts under `torch.utils.checkpoint` have their variants, too. With `rows`, the sizes
    that follow from shardings and policies hold at that number of rows alone, which takes less time.
    """
    from piper_capture import StaleCapture

    try:
        return _rewritten(traced, request, rows)
    except StaleCapture:
        _remove(traced)
        raise


@room_for_frames
def _rewritten(traced: Traced | Captured, request: CaptureRequest, rows: int | None) -> Captured:
    from piper_capture import (
        with_empty_stages,
        with_layers,
        with_policies,
        with_shardings,
        with_tiles,
    )

    with working("cutting the model at its layers"), no_garbage_collection():
        captured = with_layers(traced, request.layers)
    write_first(traced)
    with no_garbage_collection():
        captured = with_tiles(captured, request.tiles)
        if request.shardings:
            captured = with_shardings(captured, request.shardings, rows)
        captured = with_empty_stages(captured, before_empty(captured.program, request.empty_stages))
        policies = request.policies
        if any(CHECKPOINT in c.coords for c in captured.program.chunks):
            policies = (*policies, ASKED_FOR)
        return with_policies(captured, policies, rows) if policies else captured


def captured_job(job: Job) -> Captured:
    """Return the capture of a job's model with its usual layers; see `traced_job`."""
    return rewritten(traced_job(job), CaptureRequest())


@contextmanager
def captured_once() -> Iterator[None]:
    """Capture the same model, batch and loss once inside of the `with`, even if their content cannot be compared.

    It is for one command or call on one job, during which nobody changes the code and values of these.
    """
    if _HELD:
        yield
        return
    _HELD.append({})
    try:
        yield
    finally:
        _HELD.clear()


def _objects_of(job: Job, evaluating: bool) -> tuple[object, ...]:
    """Return a key that is equal for jobs whose fields, as far as a capture sees them, are the same objects."""
    functions = (job.model, job.batch, job.loss, *job.metrics.values())
    return (
        *map(id, functions),
        *job.metrics,
        job.precision.key,
        job.shared_names,
        job.batch_norm,
        evaluating,
    )


def is_held(job: Job) -> bool:
    """Return whether a job was captured inside of the `with` of `captured_once`."""
    return bool(_HELD) and _objects_of(job, evaluating=False) in _HELD[-1]


def traced_job(job: Job, evaluating: bool = False) -> Traced:
    """Return a job's model, traced; see `captured_once` for how often.

    With `evaluating` the model is in eval mode.
    """
    if not _HELD:
        return _traced_anew(job, evaluating)
    objects = _objects_of(job, evaluating)
    if objects not in _HELD[-1]:
        _HELD[-1][objects] = job, _traced_anew(job, evaluating)
    return _HELD[-1][objects][1]


def _traced_anew(job: Job, evaluating: bool) -> Traced:
    """Return a job's model, traced. Jobs that differ only in fields that a capture does not see share one.

    A job that cannot be compared with earlier ones is captured anew. Raises CaptureError inside of
    modes of torch that change the trace.
    """
    from piper_capture import check_context

    check_context()
    key = capture_key(job, evaluating=evaluating)
    if key is None:
        return _capture(job, evaluating)
    if key not in _CAPTURES:
        if len(_CAPTURES) == MOST_CAPTURES:
            forget(_CAPTURES.pop(next(iter(_CAPTURES))))
        _CAPTURES[key] = kept_or_made(
            key.file, partial(_file_of, job, evaluating), partial(_capture, job, evaluating)
        )
    return _CAPTURES[key]


def _file_of(job: Job, evaluating: bool) -> str | None:
    key = capture_key(job, evaluating=evaluating)
    return None if key is None else key.file


def capture_key(job: Job, evaluating: bool = False) -> CaptureKey | None:
    """Return the key of a job's capture; None if it cannot be told.

    The model counts by the module that its function makes, without bytes, whatever the function reads. A preset of
    `piper.models` counts by its sizes. A batch counts by the structure and shapes of two of its rows.
    """
    import torch

    from piper.api.content.content import contents_of
    from piper.api.content.replaced_functions import replaced_in_torch
    from piper_capture import built_model, own_replacements, tracer_settings
    from piper_ops import own_costs
    from piper_runtime.rank import of_outputs

    # The model is made before anything else is looked at: that may import packages that replace functions of torch.
    model = contents_of(job.model if _is_preset(job.model) else built_model(job.model))
    measured = dict(of_outputs(job.metrics))
    said = job.loss, own_replacements(), replaced_in_torch(), tracer_settings(), measured
    loss, costs = contents_of(*said, tensors=True), contents_of(own_costs(), runs=True)
    if model is None or loss is None or costs is None:
        return None
    facts = (
        *(part.digest for part in (model, loss, costs)),
        *(evaluating, _looks(job), job.shared_names, job.batch_norm, job.loss_over),
        job.precision.key,
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
    )
    content = _digest(facts)
    kept = not (model.elsewhere or loss.elsewhere)
    return CaptureKey(content, _digest((content, model.lines, loss.lines)) if kept else None)


def _digest(facts: tuple[object, ...]) -> str:
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _is_preset(model: object) -> bool:
    """Return whether a model function is that of a preset's sizes: a large one takes seconds to be made."""
    function = getattr(model, "__func__", None), type(getattr(model, "__self__", None))
    return all(
        str(getattr(part, "__module__", "")).startswith("piper.models.") for part in function
    )


def _looks(job: Job) -> str:
    """Return the structure, shapes and dtypes of the rows that a capture asks for, without the number of rows.

    Which tensors lie in the same memory counts, too.
    """
    import torch
    from torch.utils import _pytree as pytree

    from piper_capture import ASKED_ROWS, sharing_memory
    from piper_ops import batch_pair
    from piper_runtime.rank import call_batch

    rows = range(min(ASKED_ROWS, job.global_batch))
    result = call_batch(job.batch, 0, rows)
    leaves, structure = pytree.tree_flatten(batch_pair(result) or result)
    tensors = {str(k): leaf for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    looks = [
        _look(leaf, len(rows)) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves
    ]
    return f"{structure} {looks} {sharing_memory(tensors)}"


def _look(tensor: torch.Tensor, rows: int) -> str:
    """Return the dtype and shape of a tensor, and whether its first dimension is the rows, or it has none."""
    from piper_ops import is_shared

    if is_shared(tensor, "", ()):
        return f"{tensor.dtype} {tuple(tensor.shape)} shared"
    of_rows = tensor.shape[:1] == (rows,)
    return f"{tensor.dtype} {tuple(tensor.shape[of_rows:])} {of_rows}"


@room_for_frames
def _capture(job: Job, evaluating: bool = False) -> Traced:
    from piper_capture import trace
    from piper_runtime.rank import call_batch, of_outputs

    batch, dtypes = partial(call_batch, job.batch, 0), job.precision
    said = "capturing the model in eval mode" if evaluating else "capturing the model"
    with working(said), no_garbage_collection():
        return trace(
            job.model,
            batch,
            job.loss,
            dtype=dtypes.compute_dtype,
            reduce=dtypes.sums_in,
            keep=dtypes.kept,
            wide=dtypes.batch_dtype,
            float8=dtypes.quantised,
            most=job.global_batch,
            shared=job.shared_names,
            statistics=job.batch_norm is not None,
            metrics=of_outputs(job.metrics),
            evaluating=evaluating,
            whole_batch=job.loss_over == "batch",
            scaled=dtypes.scaling is not None and not evaluating,
        )
