"""Call the user's functions that make optimizers and schedules, and refuse optimizers that cannot run on a plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from piper_ir.ground.errors import JobError
from piper_ir.ground.sizes import bind
from piper_ir.program.program import Param
from piper_ir.tools import user_code
from piper_runtime.rank.job.job import NamedParameters
from piper_runtime.rank.optimizers.optimizer_kinds import ELEMENTWISE, REFUSED


def meta_parameters(params: Iterable[Param], dtype: torch.dtype) -> NamedParameters:
    """Return (name, full-shape parameter on meta) for every parameter, trained or not, in the model's order."""
    return [
        (
            p.name,
            torch.nn.Parameter(
                torch.empty([bind(d, 0) for d in p.spec.shape], dtype=dtype, device="meta"),
                requires_grad=p.trained,
            ),
        )
        for p in params
    ]


def call_optimizers(
    function: Callable[[NamedParameters], Any], named: NamedParameters
) -> list[Optimizer]:
    """Return the user's optimizers over the given parameters, most often one.

    Raises JobError for an object that is none, or is refused by name, or holds foreign parameters, and for a function
    that changes parameters or puts hooks on them.
    """
    versions = [p._version for _, p in named]
    try:
        with user_code("Job.optimizer([(name, parameter), ...])", JobError):
            returned: object = function(list(named))
    except JobError as error:
        if "Muon" not in str(error):
            raise
        raise JobError(
            f"{error}. Give it the matrices, and the other parameters to another optimizer: "
            'Job(optimizer={"layers.*.weight": muon, "*": adamw}), where each is a function of its '
            "named parameters. piper.BatchedMuon also takes stacks of matrices, such as experts"
        ) from error.__cause__
    for (name, p), version in zip(named, versions, strict=True):
        _check_untouched(name, p, version)
    several = isinstance(returned, list | tuple)
    optimizers: Sequence[Any] = list(returned) if isinstance(returned, list | tuple) else [returned]
    if not optimizers:
        raise JobError("Job.optimizer returned no optimizer; a torch.optim.Optimizer is needed")
    for optimizer in optimizers:
        _check(optimizer, {id(p) for _, p in named}, "a list with " if several else "")
    seen: set[int] = set()
    for p in (
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    ):
        if id(p) in seen:
            name = next(n for n, q in named if q is p)
            raise JobError(
                f"Job.optimizer gives parameter {name!r} to two optimizers; each parameter belongs to one"
            )
        seen.add(id(p))
    return list(optimizers)


def _check_untouched(name: str, p: Tensor, version: int) -> None:
    """Raise JobError if a user's function has changed a parameter or put a hook on its gradient: a plan has neither."""
    if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
        raise JobError(
            f"Job.optimizer puts a hook on the gradient of parameter {name!r}, which a plan would not run. Change "
            f"gradients in the optimizer's step, clip them with Job(clip_norm=...), or write a "
            f"torch.autograd.Function whose backward is the hook, and apply it to the parameter in forward"
        )
    if p._version != version:
        raise JobError(
            f"Job.optimizer changes the values of parameter {name!r}, which a plan would not do. Set initial values in "
            f"the function that makes the model, or read them with Job(init=...)"
        )


def _check(optimizer: object, known: set[int], among: str) -> None:
    """Raise JobError for an optimizer that cannot run on a plan."""
    kind = type(optimizer).__name__
    returned = f"Job.optimizer returned {among}"
    if not isinstance(optimizer, Optimizer):
        raise JobError(f"{returned}a {kind}; a torch.optim.Optimizer is needed, or a list of them")
    if kind in REFUSED:
        raise JobError(f"{returned}{kind}, which cannot run on a plan: {REFUSED[kind]}")
    if any(getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")):
        raise JobError(
            f"{returned}{kind} with step hooks, which would see the parameters of one rank only; leave them out "
            f"(to clip, set Job(clip_norm=...))"
        )
    if type(optimizer) in ELEMENTWISE and any(
        optimizer.state.values()
    ):  # torch makes their state in the first step
        raise JobError(
            f"{returned}{kind} with state that it has loaded, which would be lost: a plan keeps the state of "
            f"{kind} in buckets of its own and starts without any. Leave out load_state_dict, and set the learning "
            f"rate in the groups"
        )
    for index, group in enumerate(optimizer.param_groups):
        if not all(id(p) in known for p in group["params"]):
            raise JobError(
                f"Job.optimizer: group {index} holds a tensor that it was not given; build the groups from the "
                f"(name, parameter) list only"
            )
        if isinstance(group.get("lr"), torch.Tensor):
            raise JobError(
                f"Job.optimizer: group {index} has a tensor as lr; give a float, which a scheduler changes as well"
            )
        if group.get("differentiable"):
            raise JobError("Job.optimizer: differentiable=True is not supported; leave it out")


def call_schedulers(
    function: Callable[[Optimizer], Any] | None, optimizers: Iterable[Optimizer]
) -> list[LRScheduler]:
    """Return the user's learning-rate schedule of each optimizer; none without a function.

    Raises JobError for an object that is none, or needs more than the number of the step.
    """
    return [] if function is None else [_called(function, optimizer) for optimizer in optimizers]


def _called(function: Callable[[Optimizer], Any], optimizer: Optimizer) -> LRScheduler:
    with user_code("Job.scheduler(optimizer)", JobError):
        schedule: object = function(optimizer)
    if isinstance(schedule, ReduceLROnPlateau):
        raise JobError(
            "Job.scheduler returned ReduceLROnPlateau, which cannot run on a plan: it follows a metric, and no "
            "rank has one of the whole model; give a schedule of the step's number, such as LambdaLR"
        )
    if not isinstance(schedule, LRScheduler):
        raise JobError(
            f"Job.scheduler returned a {type(schedule).__name__}; a torch.optim.lr_scheduler.LRScheduler is needed"
        )
    return schedule


def advance(schedule: LRScheduler, steps: int) -> None:
    """Bring a new schedule to its state after so many optimizer steps: it depends on their number alone."""
    with (
        warnings.catch_warnings(),
        user_code(f"Job.scheduler(optimizer) after {steps} steps", JobError),
    ):
        # It asks whether the optimizer has made a step; those steps were made by an earlier run.
        warnings.filterwarnings(
            "ignore", message=r"Detected call of `lr_scheduler.step\(\)` before"
        )
        for _ in range(steps):
            schedule.step()


def schedule_state(schedules: Sequence[LRScheduler]) -> Mapping[str, Any]:
    """Return the state of schedules as state_dict has it: of several, each name behind the number of its schedule."""
    states = [schedule.state_dict() for schedule in schedules]
    if len(states) == 1:
        return dict(states[0])
    return {
        f"{number}.{key}": value
        for number, state in enumerate(states)
        for key, value in state.items()
    }


def names_of(objects: Sequence[object]) -> str:
    """Return the class names of optimizers or schedules, for people and checkpoints."""
    return " + ".join(type(o).__name__ for o in objects)


def keep_from_start(optimizer: Optimizer) -> None:
    """Make the state that Adagrad makes in its constructor, for parameters that replaced others."""
    if type(optimizer) is Adagrad:
        optimizer.state.update(
            Adagrad([dict(group) for group in optimizer.param_groups], **optimizer.defaults).state
        )


def one_by_one(optimizer: Optimizer, *, fused: bool) -> None:
    """Choose the kernels that go from parameter to parameter, unless the user has chosen.

    Torch's choice on CUDA takes them all at once, with temporaries as large as all of them. Without `fused` the user's
    choice of a fused kernel is undone too.
    """
    for group in optimizer.param_groups:
        if not fused and "fused" in group:
            group["fused"] = False
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = False
