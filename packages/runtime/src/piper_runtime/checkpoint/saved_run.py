"""Open a checkpoint, and check that it is complete, that it is one of Piper's, and that it fits the job."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from piper_ir.ground.codec import loads
from piper_ir.ground.errors import FormatError, JobError, PiperWarning
from piper_ir.ground.sizes import TensorSpec, bind
from piper_ir.plan.plan import Plan
from piper_runtime.checkpoint.meta import CheckpointMeta, data_changes, shared_axes
from piper_runtime.checkpoint.rank_tensors import (
    OPTIMIZER,
    group_settings,
    kept_keys,
    model_key,
    plain_settings,
    saved_dtypes,
)
from piper_runtime.checkpoint.settings import step_of
from piper_runtime.rank.job.job import Job
from piper_runtime.rank.optimizers.optimizer_calls import (
    advance,
    call_optimizers,
    call_schedulers,
    meta_parameters,
    schedule_state,
)
from piper_runtime.rank.optimizers.optimizer_groups import (
    given_settings,
    groups_of,
    optimizer_spec,
    state_keys,
)
from piper_runtime.weights.dcp_tensors import SavedTensor
from piper_runtime.weights.marker import META, decoded, marked_tensors


@dataclass(frozen=True)
class SavedRun:
    """Hold the contents of a complete checkpoint: its folder, the metadata of its run, and the place of each tensor."""

    path: Path
    meta: CheckpointMeta
    tensors: Mapping[str, SavedTensor]

    @property
    def weights_only(self) -> bool:
        """Return whether it is a beginning: weights without any step of training."""
        return self.meta.step == 0 and not any(
            key.startswith(f"{OPTIMIZER}.") for key in self.tensors
        )


def open_checkpoint(path: Path) -> SavedRun:
    """Return the run that a checkpoint holds.

    Raises JobError when it is missing, incomplete or not one of Piper's, and FormatError when it was changed, or when a
    file of it is of another step or run.
    """
    if not path.is_dir():
        raise JobError(f"{path}: there is no such folder; give the path of a checkpoint")
    described, tensors = marked_tensors(path)
    meta = loads(CheckpointMeta, decoded(described, path / META), str(path / META))
    if meta.step < 0:
        raise FormatError(
            f"{path / META}: step {meta.step} is before the first one; take another checkpoint"
        )
    if (named := step_of(path)) is not None and named != meta.step:
        raise FormatError(
            f"{path} holds step {meta.step}, and not the one of its name; rename the folder, or take another one"
        )
    return SavedRun(path, meta, tensors)


def check_resumable(saved: SavedRun, plan: Plan, job: Job) -> None:
    """Raise JobError when a checkpoint is of another training than a plan's and a job's, each difference by name.

    A program that differs otherwise (another version of the same model) is a warning, where it can be told: programs
    of devices that share chunks in another way differ, too.
    """
    for problem in _other_training(saved, plan, job):
        raise JobError(f"the checkpoint {saved.path} {problem}")
    saved_key = saved.meta.program_key
    alike = saved.meta.strategy.get("shared", {}) == shared_axes(plan)
    if alike and saved_key and saved_key != plan.program_key:
        warnings.warn(
            f"the checkpoint {saved.path} was made with another program of a model with the same parameters; the "
            f"run goes on with this one",
            PiperWarning,
            stacklevel=2,
        )


WEIGHTS_FROM = "to start another training from its weights, give its folder as Job(init=...)"


def _other_training(saved: SavedRun, plan: Plan, job: Job) -> Iterator[str]:
    meta = saved.meta
    for name, ours, theirs in (
        ("seed", job.seed, meta.seed),
        ("global_batch", job.global_batch, meta.global_batch),
    ):
        if (
            theirs is not None
            and ours != theirs
            and name not in getattr(job.batch, "follows_state", ())
        ):
            yield (
                f"was made with {name}={theirs}, the job has {ours}; use the same, or {WEIGHTS_FROM}"
            )
    if meta.seed is not None and (changes := data_changes(job, meta.data)):
        yield f"was made with other data ({changes}); use the same, or {WEIGHTS_FROM}"
    yield from _other_tensors(saved, plan)
    if saved.weights_only:
        return
    spec = optimizer_spec(job, plan.whole_params)
    if spec.kind != meta.optimizer:
        yield (
            f"holds the state of {meta.optimizer or 'no optimizer'}, the job has {spec.kind}; use "
            f"the same, or {WEIGHTS_FROM}"
        )
    trained, before = {p.name for p in plan.params if p.trained}, set(meta.trained)
    for name in sorted(trained ^ before):
        then, now = ("frozen", "trained") if name in trained else ("trained", "frozen")
        yield (
            f"was made with parameter {name!r} {then}, which is {now} in the job; use the same, or {WEIGHTS_FROM}"
        )
    if spec.separable:
        yield from _other_keys(saved, state_keys(job, plan.whole_params))


def _other_keys(saved: SavedRun, needed: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield a message for each parameter whose optimizer state has other keys in the checkpoint."""
    saved_keys = kept_keys([*saved.tensors, *saved.meta.numbers])
    for name, keys in needed.items():
        if saved_keys.get(name, set()) != keys:
            then, now = (
                ", ".join(sorted(kept)) or "nothing" for kept in (saved_keys.get(name, set()), keys)
            )
            yield (
                f"was made when the optimizer kept {then}, with this job's settings it keeps {now} of parameter "
                f"{name!r}; use the settings of then (momentum, amsgrad, centered, ...)"
            )


def _other_tensors(saved: SavedRun, plan: Plan) -> Iterator[str]:
    dtypes = saved_dtypes(plan)
    wanted: dict[str, tuple[str, TensorSpec]] = {
        p.name: ("parameter", replace(p.spec, dtype=dtypes.get(p.name, p.spec.dtype)))
        for p in plan.whole_params
    }
    wanted |= {b.name: ("buffer", b.spec) for b in plan.buffers if b.name not in wanted}
    for name, (kind, spec) in wanted.items():
        tensor = saved.tensors.get(model_key(name))
        shape = tuple(bind(d, 0) for d in spec.shape)
        if tensor is None:
            if (
                saved.meta.seed is not None or kind == "parameter"
            ):  # files of other programs hold no buffers that are made
                yield f"has no {kind} {name!r}, which the model has; use the same model"
        elif tensor.shape != shape:
            yield (
                f"has {kind} {name!r} of shape {list(tensor.shape)}, the model one of "
                f"{list(shape)}; use the same model"
            )
        elif tensor.dtype != spec.dtype and not (
            saved.weights_only and _are_floats(tensor.dtype, spec.dtype)
        ):
            yield (
                f"has {kind} {name!r} in {tensor.dtype}, the model in {spec.dtype}; use the same precision"
            )
    names = {model_key(n) for n in wanted} | {model_key(n) for n in saved.meta.tied}
    more = [key for key in saved.tensors if key.startswith("model.") and key not in names]
    for key in more:
        yield f"has {key.removeprefix('model.')!r}, which the model has not; use the same model"


def _are_floats(*dtypes: str) -> bool:
    return all(getattr(torch, dtype).is_floating_point for dtype in dtypes)


def check_settings(saved: SavedRun, plan: Plan, job: Job) -> None:
    """Warn if the optimizer's groups have other settings than the checkpoint's after as many steps.

    The same is said of the state of a schedule, which was made anew and has counted the steps again.
    """
    dtype = next((getattr(torch, p.spec.dtype) for p in plan.params), torch.float32)
    optimizers = call_optimizers(job.make_optimizers, meta_parameters(plan.whole_params, dtype))
    schedules = call_schedulers(job.scheduler, optimizers)
    for rebuilt in schedules:
        advance(rebuilt, saved.meta.step)
    schedule = plain_settings(schedule_state(schedules))
    _compare("schedule", schedule, saved.meta.schedule_state, saved)
    settings, then = group_settings(list(groups_of(optimizers))), saved.meta.groups
    given = [given_settings(optimizer) for optimizer in optimizers for _ in optimizer.param_groups]
    for name, index, before in _groups(saved, plan):
        what = f"group {index}" + (
            f", with parameter {name!r} of group {before} then," if index != before else ""
        )
        if index < len(settings) and 0 <= before < len(then):
            now = {k: v for k, v in settings[index].items() if k in given[index]}
            _compare(what, now, then[before], saved)


def _groups(saved: SavedRun, plan: Plan) -> Iterator[tuple[str, int, int]]:
    """Yield each pair of groups, now and in the checkpoint, that have a parameter in common, with the first one."""
    seen: set[tuple[int, int]] = set()
    for bucket in plan.buckets:
        for name in bucket.params:
            pair = bucket.group, saved.meta.group_of.get(name, bucket.group)
            if pair not in seen:
                seen.add(pair)
                yield name, *pair


def _compare(what: str, now: Mapping[str, Any], then: Mapping[str, Any], saved: SavedRun) -> None:
    changed = sorted(k for k in now.keys() & then.keys() - _KERNELS if now[k] != then[k])
    if changed:
        values = ", ".join(f"{k}={now[k]!r} for {then[k]!r}" for k in changed)
        warnings.warn(
            f"the optimizer's {what} goes on with other settings than the checkpoint {saved.path} has in step "
            f"{saved.meta.step}: {values}",
            PiperWarning,
            stacklevel=4,
        )


_KERNELS = {"fused", "foreach", "capturable", "differentiable", "param_names"}
"""The settings of groups that choose the kernel of a step, and do not change its result."""
