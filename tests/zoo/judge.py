"""Compare one model under a plan with plain PyTorch in float64."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

import piper
from piper.api.captures import capturing
from piper.api.captures.capturing import CaptureKey, captured_job
from piper.api.reference.reference import reference
from piper.api.reference.reference_differences import FLOOR, RunOutcome, typical_norm
from piper.api.reference.tolerance import STRICT
from piper_capture import narrowest
from piper_ir.ground.errors import PiperError
from tests.zoo.entries import Entry, batch_of, distance, features, first_tensor

MICROBATCHES, ROWS, STEPS = 2, 3, 2
MOST_SAID = 1000
"""The most characters of a message that are kept."""


def tried(entry: Entry, replicas: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield what becomes of a model with two stages and so many replicas, once for each number.

    A line has the largest error, the refusal, or what else went wrong. The model is captured once for all of them, also
    where two jobs of one model cannot be told to be alike.
    """
    warnings.simplefilter("ignore")
    same = CaptureKey(entry.name)
    found = capturing.capture_key
    with mock.patch.object(
        capturing, "capture_key", lambda job, **given: found(job, **given) or same
    ):
        for number in replicas:
            begin = time.process_time()
            line = {"model": entry.name, "dp": number, **became(entry, number)}
            yield line | {"seconds": round(time.process_time() - begin, 1)}


def became(entry: Entry, replicas: int) -> dict[str, Any]:
    """Return the outcome for a model, and its error or the reason; it is not made where plain PyTorch cannot run it."""
    try:
        run_plain(entry)
    except Exception as error:  # of whatever kind: the configuration, not Piper, is at fault
        return {"outcome": "not made", "why": said(error)}
    try:
        found: dict[str, Any] = {"outcome": "equal", "error": error_of(entry, replicas)}
        if found["error"] > STRICT.value:
            found["narrow"] = narrow_line(entry, replicas)
    except PiperError as error:
        return {"outcome": "refused", "why": said(error)}
    except Exception as error:  # the table says so: none of these should be
        return {"outcome": "failed", "why": f"{type(error).__name__}: {said(error)}"}
    return found


def run_plain(entry: Entry) -> None:
    """Make a model and run its forward and backward once, without Piper."""
    job = job_of(entry, 1)
    model, batch = entry.make().to(getattr(torch, entry.params)), job.batch(0, range(2))
    given, targets = (batch, None) if entry.own_loss else batch
    cast = pytree.tree_map(
        lambda t: t.to(getattr(torch, entry.params)) if t.is_floating_point() else t, given
    )
    output = (
        model(**cast)
        if isinstance(cast, dict)
        else model(*cast)
        if isinstance(cast, tuple)
        else model(cast)
    )
    loss = first_tensor(output) if targets is None else distance(output, targets)
    loss.backward()  # type: ignore[no-untyped-call]  # torch


def said(error: BaseException) -> str:
    """Return a message in one line: whole where it is Piper's, whose end is the way out, else its first line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return (
        " ".join(line.strip() for line in lines)[:MOST_SAID]
        if isinstance(error, PiperError)
        else lines[0][:MOST_SAID]
    )


def job_of(entry: Entry, replicas: int) -> piper.Job:
    """Return the job that trains a model; batch statistics are those of the microbatch where Piper has the choice."""
    rows = MICROBATCHES * ROWS * replicas
    fields = {f.name for f in dataclasses.fields(piper.Job)}
    more: dict[str, Any] = {"batch_norm": "microbatch"} if "batch_norm" in fields else {}
    return piper.Job(
        entry.make,
        batch_of(entry, rows),
        None if entry.own_loss else distance,
        lambda named: torch.optim.SGD([p for _, p in named], lr=1e-3),
        global_batch=rows,
        precision=piper.Precision(params=entry.params),
        **more,
    )


def error_of(entry: Entry, replicas: int) -> float:
    """Return the largest relative difference of a loss, or of a gradient before an update, from plain PyTorch."""
    job = job_of(entry, replicas)
    recipe = [*piper.recipes.one_f_one_b(pp=2, microbatches=MICROBATCHES)]
    if replicas > 1:
        recipe += piper.recipes.data_parallel()
    mesh = piper.Mesh(pp=2, dp=replicas) if replicas > 1 else piper.Mesh(pp=2)
    compiled = piper.compile(job, piper.Strategy(mesh, recipe))
    run = piper.execute(compiled, steps=STEPS, launcher="inline", memory=False, gradients=True)
    expected = reference(job, replicas=replicas, microbatches=MICROBATCHES, steps=STEPS)
    return largest(RunOutcome.of(run), expected)


def largest(outcome: RunOutcome, expected: Any) -> float:
    """Return the largest error, relative to a tensor's norm and the typical one; infinity for one that is missing."""
    errors = [abs(a - b) / abs(b) for a, b in zip(outcome.losses, expected.losses, strict=True)]
    for step, wanted in enumerate(expected.gradients):
        norms = {name: float(torch.linalg.vector_norm(g.double())) for name, g in wanted.items()}
        typical = typical_norm(norms)
        for name, gradient in wanted.items():
            got = [steps[step][name] for steps in outcome.gradients.values() if name in steps[step]]
            allowed = norms[name] + FLOOR * typical
            off = [float(torch.linalg.vector_norm(g.double() - gradient.double())) for g in got]
            errors.append(max(off) / allowed if off and allowed else 0.0 if off else float("inf"))
    return max(errors)


def narrow_line(entry: Entry, replicas: int) -> str:
    """Return the line where the model computes in float32 or less whatever its parameters are, as norms of transformers
    do."""
    if entry.params != "float64":
        return f"all of it in {entry.params}, since plain PyTorch fails in float64"
    found = narrowest(captured_job(job_of(entry, replicas)).forward)
    return "" if found is None else f"{found.dtype} in {found.line}"


def warm_up() -> None:
    """Capture something small, so that processes forked from this one have all imports behind them."""
    rows, blocks = features(4, 8), [nn.Linear(8, 8) for _ in range(2)]
    error_of(Entry("torch.nn", "Linear", lambda: nn.Sequential(*blocks), rows), 1)
