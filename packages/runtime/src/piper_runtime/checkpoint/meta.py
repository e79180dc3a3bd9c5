"""Define the metadata of a checkpoint: the description of its run, beside the tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, ClassVar
from uuid import uuid4

import torch

from piper_ir.ground.errors import JobError
from piper_ir.plan.plan import Plan
from piper_ir.tools import user_code
from piper_runtime.rank.job.job import Job


@dataclass(frozen=True)
class CheckpointMeta:
    """Describe the run that a checkpoint was made of.

    Attributes:
        step: how many optimizer steps are done; the run goes on with the step of this number.
        seed: the seed of the job; None if no job has made the checkpoint.
        global_batch: rows of a step; None as for `seed`.
        optimizer: the class name of the optimizer; empty if there is no optimizer state.
        groups: the settings of the optimizer's groups, as the schedule has left them.
        group_of: the index of the group of each trained parameter.
        schedule: the class name of the learning-rate schedule; None without one.
        schedule_state: the schedule's state, as far as JSON holds it.
        loss_scale: the scale of the loss, see `RunningScale.state`; empty if it is not scaled.
        counters: the steps that the optimizer has counted, by parameter.
        numbers: the optimizer's state beside tensors, by name in the checkpoint.
        trained: the parameters that are trained.
        tied: further names of parameters, each with the first one.
        data: the batch function's fingerprint and state of its data, see `data_of`.
        program_key: the key of the program.
        plan_key: the key of the plan.
        strategy: the mesh and the microbatches of the plan, for people.
        versions: the versions of Piper and torch.
        run: a random name of the run, or of its attempt after a restart; empty if no run has made the checkpoint.
    """

    FORMAT: ClassVar[str] = "piper-checkpoint"

    step: int
    seed: int | None = None
    global_batch: int | None = None
    optimizer: str = ""
    groups: tuple[Mapping[str, Any], ...] = ()
    schedule: str | None = None
    schedule_state: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    trained: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    program_key: str = ""
    plan_key: str = ""
    strategy: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    group_of: Mapping[str, int] = field(default_factory=dict)
    run: str = ""
    loss_scale: Mapping[str, float] = field(default_factory=dict)


def data_of(job: Job, step: int) -> dict[str, Any]:
    """Return the fingerprint and state of a batch function's data after some steps; nothing for an ordinary function.

    "fingerprint" is its attribute or method of this name, which is the same in every step; "state" is the return value
    of its method `state_dict(step)`. Raises JobError when these fail, and for values that JSON does not hold.
    """
    batch: Any = job.batch
    data: dict[str, Any] = {}
    if hasattr(batch, "fingerprint"):
        with user_code("Job.batch.fingerprint()", JobError):
            data["fingerprint"] = (
                batch.fingerprint() if callable(batch.fingerprint) else batch.fingerprint
            )
    if callable(getattr(batch, "state_dict", None)):
        with user_code(f"Job.batch.state_dict({step})", JobError):
            data["state"] = batch.state_dict(step)
    try:
        return dict(json.loads(json.dumps(data, allow_nan=False)))
    except (TypeError, ValueError) as e:
        raise JobError(
            f"what Job.batch says of its data cannot be saved ({e}); give texts, numbers, lists or dicts as its "
            f"fingerprint and state_dict"
        ) from e


def data_changes(job: Job, saved: Mapping[str, Any]) -> str:
    """Return how a job's data differ from the data of a checkpoint; an empty text if they do not.

    Names in the batch function's `follows_state` may differ, since its state has the place to go on from.
    """
    now, before = data_of(job, 0).get("fingerprint"), saved.get("fingerprint")
    if isinstance(now, dict) and isinstance(before, dict):
        free = getattr(job.batch, "follows_state", ())
        names = [n for n in {**before, **now} if n not in free and before.get(n) != now.get(n)]
        return ", ".join(f"{n} {before.get(n)!r:.80} -> {now.get(n)!r:.80}" for n in names)
    return "" if now == before else f"{before!r:.80} -> {now!r:.80}"


def about_run(plan: Plan, job: Job) -> CheckpointMeta:
    """Return the description of a run before its first step."""
    strategy = {
        "mesh": {axis: plan.mesh.size(axis) for axis in plan.mesh.axes},
        "microbatches": plan.microbatches,
        "rows": plan.rows,
        "replicas": plan.replicas,
        "shared": shared_axes(plan),
    }
    return CheckpointMeta(
        0, job.seed, job.global_batch, trained=tuple(p.name for p in plan.params if p.trained),
        tied={other: p.name for p in plan.params for other in p.tied}, data=data_of(job, 0), program_key=plan.program_key,
        plan_key=plan.key, strategy=strategy, versions=versions(),
        group_of={name: b.group for b in plan.buckets for name in b.params}, run=uuid4().hex,
    )  # fmt: skip


def shared_axes(plan: Plan) -> dict[str, int]:
    """Return the axes along which devices share chunks, whose program is the part of one of them."""
    return {axis: plan.mesh.size(axis) for axis in plan.shared}


def versions() -> dict[str, str]:
    """Return the versions of the software that writes a checkpoint."""
    try:
        own = metadata.version("piper-training")
    except metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
        own = "not installed"
    return {"Piper": own, "torch": str(torch.__version__)}
