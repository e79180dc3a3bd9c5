"""Check that a run's model is the one that its plan was compiled for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch

from piper_ir.ground.errors import JobError
from piper_ir.ground.sizes import TensorSpec, bind
from piper_ir.plan.plan import Plan
from piper_ops import dtype_name
from piper_runtime.rank.job.job import InitialState
from piper_runtime.weights import TensorForm, check_separate, forms_of

ADVICE = "The model function gives another model than when it was compiled: compile the job again (piper.compile)"


def check_same_model(
    plan: Plan, initial: InitialState, trainable: Collection[str] | None = None
) -> None:
    """Raise JobError if names, shapes, ties or requires_grad differ from the plan's, or a tensor has no values.

    `trainable` names the parameters that had requires_grad when the model was captured; None if that is unknown.
    """
    for problem in _differences(plan, initial, trainable):
        raise JobError(f"Job.model() now {problem}. {ADVICE}")
    check_separate(initial.real_tensors)
    for name, tensor in initial.real_tensors.items():
        if tensor.is_meta:
            kind = "parameter" if name in initial.params else "buffer"
            raise JobError(
                f"Job.model() leaves {kind} {name!r} on the meta device, where it has no values to start from. "
                f"Make the model without torch.device('meta') (Piper plans it without memory all the same), or "
                f"give it values in the model function: model.to_empty(device='cpu'), then its own initialisation"
            )


def _differences(
    plan: Plan, initial: InitialState, trainable: Collection[str] | None
) -> Iterator[str]:
    yield from _names("parameter", _as_made(plan), forms_of(initial.params))
    yield from _names("buffer", {b.name: b.spec for b in plan.buffers}, forms_of(initial.buffers))
    tied = {other: p.name for p in plan.params for other in p.tied}
    tied_now = {other: first for other, first in initial.tied.items() if first in initial.params}
    for name in sorted(tied.keys() | tied_now.keys()):
        if tied.get(name) != tied_now.get(name):
            now, then = (
                f"is tied to {t[name]!r}" if name in t else "is a parameter of its own"
                for t in (tied_now, tied)
            )
            yield f"has {name!r} that {now}; in the compiled one it {then}"
    trained_now = initial.trainable
    for p in plan.params:
        compiled = p.name in trainable if trainable is not None else p.trained
        trains = p.name in trained_now
        if trains != compiled and (compiled or trainable is not None):
            yield (
                f"has parameter {p.name!r} with requires_grad={trains}; in the compiled one it has "
                f"requires_grad={compiled}"
            )


def _as_made(plan: Plan) -> dict[str, TensorSpec]:
    """Return the specs of parameters as a job makes them: in the dtype of the update, which is one for all."""
    dtype = next((b.dtype for b in plan.buckets), "")
    floats = {p.name for p in plan.params if getattr(torch, p.spec.dtype).is_floating_point}
    return {
        p.name: replace(p.spec, dtype=dtype) if dtype and p.name in floats else p.spec
        for p in plan.whole_params
    }


def _names(
    kind: str, planned: Mapping[str, TensorSpec], made: Mapping[str, TensorForm]
) -> Iterator[str]:
    for name in made:
        if name not in planned:
            yield f"has {kind} {name!r}, which the compiled one has not"
    for name, spec in planned.items():
        if name not in made:
            yield f"has no {kind} {name!r}, which the compiled one has"
            continue
        shape, now = [bind(d, 0) for d in spec.shape], list(made[name].shape)
        if now != shape:
            yield f"has {kind} {name!r} of shape {now}; in the compiled one it has {shape}"
        dtype = dtype_name(made[name].dtype)
        if dtype != spec.dtype:
            yield f"has {kind} {name!r} of {dtype}; in the compiled one it is of {spec.dtype}"
