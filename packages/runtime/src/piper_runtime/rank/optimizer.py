"""Run the user's optimizer on flat buckets: its groups, the size of its state, and the real one of a rank.

The user's function is called with every parameter at its full shape on meta, so that rules such as "no decay for ndim <
2" see true shapes. Element-wise optimizers then run on one flat tensor per bucket; all others on the parameters of a
bucket, one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from piper_ir.errors import JobError
from piper_ir.plan import Bucket, Plan
from piper_ir.program import Param
from piper_ir.sizes import ITEM_BYTES, bind
from piper_ir.tools import user_code
from piper_runtime.rank import device as devices
from piper_runtime.rank.device import CPU, choose_device
from piper_runtime.rank.fused import fused_problem, warn_unfused
from piper_runtime.rank.job import Job, NamedParameters
from piper_runtime.rank.optimizer_sizes import state_bytes, step_bytes

if TYPE_CHECKING:
    from piper_runtime.rank.store import Store

ELEMENTWISE: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW)
"""The optimizers whose update of an element depends on it only, by exact class: a subclass may do anything."""

SEPARABLE: tuple[type[Optimizer], ...] = (
    *ELEMENTWISE,
    *(
        getattr(torch.optim, name)
        for name in ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop")
        if hasattr(torch.optim, name)
    ),
)
"""The optimizers whose update of a parameter depends on that parameter only, by exact class.

Any other may couple parameters (a norm over all of them), and a rank of a pipeline sees only its own.
"""

REFUSED = {"LBFGS": "it calls the loss several times per step", "SparseAdam": "it needs sparse gradients"}
STEP_COUNTER_BYTES = 4
"""The bytes of the float32 in which Adam and AdamW count their steps, one per tensor."""


@dataclass(frozen=True)
class OptimizerSpec:
    """Describe an optimizer before it runs.

    Attributes:
        kind: the optimizer's class name.
        group_of: index of the group of each trained parameter.
        flat: whether it runs on whole buckets. An element-wise optimizer whose fused kernel is wrong here is not flat.
        state_copies: per group, how many values it keeps per element of a bucket (flat only).
        param_bytes: bytes of state per parameter, of optimizers that are not flat.
        separable: whether it is known to update each parameter by itself.
        update_bytes: most bytes of temporaries in a step over all parameters, which a rank that holds a part of them
            may not reach; 0 where it is flat, since the fused kernels hold none.
    """

    kind: str
    group_of: Mapping[str, int]
    flat: bool
    state_copies: tuple[int, ...] = ()
    param_bytes: Mapping[str, int] = field(default_factory=dict)
    counters: int = 0
    separable: bool = True
    update_bytes: int = 0

    def state_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of optimizer state that a holder of the bucket keeps."""
        if self.flat:
            return self.state_copies[bucket.group] * bucket.numel * ITEM_BYTES[bucket.dtype] + self.counters
        return sum(self.param_bytes[p] for p in bucket.params)


def optimizer_spec(job: Job, params: Sequence[Param]) -> OptimizerSpec:
    """Return the groups of the user's optimizer, from a call of its function on meta parameters.

    Raises JobError when a trained parameter is in no group, or the optimizer cannot run on a plan.
    """
    trained = {p.name for p in params if p.trained}
    named = meta_parameters(params, job.precision.dtype)
    optimizer = call_optimizer(job.optimizer, named)
    name_of = {id(p): name for name, p in named}
    group_of = {
        name_of[id(p)]: index
        for index, group in enumerate(optimizer.param_groups)
        for p in group["params"]
        if name_of.get(id(p)) in trained
    }
    if missing := sorted(trained - group_of.keys()):
        raise JobError(
            f"Job.optimizer puts {', '.join(missing[:5])}{' and more' if len(missing) > 5 else ''} in no parameter group; "
            f"give every parameter to the optimizer, or set requires_grad=False in the model for those that stay as they are"
        )
    kind = type(optimizer).__name__
    problem = _fused_problem(optimizer, job.precision.dtype, _planned_device())
    if problem:
        warn_unfused(optimizer, job.precision.dtype, problem)
    if type(optimizer) in ELEMENTWISE and not problem:
        copies = tuple(_state_copies(optimizer, group) for group in optimizer.param_groups)
        return OptimizerSpec(kind, group_of, True, copies, counters=0 if type(optimizer) is SGD else STEP_COUNTER_BYTES)
    _one_by_one(optimizer, fused=not problem)
    state = state_bytes(optimizer, named, trained)
    held = step_bytes(optimizer, named)
    separable = type(optimizer) in SEPARABLE
    return OptimizerSpec(kind, group_of, False, param_bytes=state, separable=separable, update_bytes=held)


def state_keys(job: Job, params: Sequence[Param]) -> dict[str, set[str]]:
    """Return under which keys the job's optimizer keeps something of each trained parameter after a step."""
    trained = {p.name for p in params if p.trained}
    named = meta_parameters(params, job.precision.dtype)
    optimizer = call_optimizer(job.optimizer, named)
    _one_by_one(optimizer, fused=False)
    state_bytes(optimizer, named, trained)
    return {name: set(optimizer.state[p]) for name, p in named if name in trained}


def _planned_device() -> torch.device | None:
    """Return the device whose fused kernels are tried when a plan is made: the CPU where runs take it.

    A CUDA device is tried by the rank that has it: the process that makes a plan must not hold memory there.
    """
    device = choose_device(devices.default, 0)
    return device if device == CPU else None


def _fused_problem(optimizer: Optimizer, dtype: torch.dtype, device: torch.device | None) -> str:
    """Return why the fused kernel of an element-wise optimizer is not used on a device; an empty text if it is."""
    if device is None or type(optimizer) not in ELEMENTWISE:
        return ""
    return fused_problem(optimizer, dtype, device)


def _one_by_one(optimizer: Optimizer, *, fused: bool) -> None:
    """Choose the kernels that go from parameter to parameter, where the user has not chosen.

    Torch's choice on CUDA takes them all at once, with temporaries as large as all of them. Without `fused` the user's
    choice of a fused kernel is undone too.
    """
    for group in optimizer.param_groups:
        if not fused and "fused" in group:
            group["fused"] = False
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = False


def meta_parameters(params: Iterable[Param], dtype: torch.dtype) -> NamedParameters:
    """Return (name, full-shape parameter on meta) for every parameter, trained or not, in the model's order."""
    return [
        (
            p.name,
            torch.nn.Parameter(
                torch.empty([bind(d, 0) for d in p.spec.shape], dtype=dtype, device="meta"), requires_grad=p.trained
            ),
        )
        for p in params
    ]


def call_optimizer(function: Callable[[NamedParameters], Optimizer], named: NamedParameters) -> Optimizer:
    """Return the user's optimizer over the given parameters.

    Raises JobError for an object that is none, or is refused by name, or holds foreign parameters.
    """
    with user_code("Job.optimizer([(name, parameter), ...])", JobError):
        optimizer: object = function(list(named))
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise JobError(f"Job.optimizer returned a {kind}; a torch.optim.Optimizer is needed")
    if kind in REFUSED:
        raise JobError(f"Job.optimizer returned {kind}, which cannot run on a plan: {REFUSED[kind]}")
    if any(getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")):
        raise JobError(
            f"Job.optimizer returned {kind} with step hooks, which would see the parameters of one rank only; leave them "
            "out (to clip, set Job(clip_norm=...))"
        )
    if type(optimizer) in ELEMENTWISE and any(optimizer.state.values()):  # torch makes their state in the first step
        raise JobError(
            f"Job.optimizer returned {kind} with state that it has loaded, which would be lost: a plan keeps the state of {kind} "
            "in buckets of its own and starts without any. Leave out load_state_dict, and set the learning rate in the groups"
        )
    known = {id(p) for _, p in named}
    for index, group in enumerate(optimizer.param_groups):
        if not all(id(p) in known for p in group["params"]):
            raise JobError(
                f"Job.optimizer: group {index} holds a tensor that it was not given; build the groups from the "
                f"(name, parameter) list only"
            )
        if isinstance(group.get("lr"), torch.Tensor):
            raise JobError(f"Job.optimizer: group {index} has a tensor as lr; give a float, which a scheduler changes as well")
        if group.get("differentiable"):
            raise JobError("Job.optimizer: differentiable=True is not supported; leave it out")
    return optimizer


def call_scheduler(function: Callable[[Optimizer], Any], optimizer: Optimizer) -> LRScheduler:
    """Return the user's learning-rate schedule of an optimizer.

    Raises JobError for an object that is none, or needs more than the number of the step.
    """
    with user_code("Job.scheduler(optimizer)", JobError):
        schedule: object = function(optimizer)
    if isinstance(schedule, ReduceLROnPlateau):
        raise JobError(
            "Job.scheduler returned ReduceLROnPlateau, which cannot run on a plan: it follows a metric, and no rank has one of "
            "the whole model; give a schedule of the step's number, such as LambdaLR"
        )
    if not isinstance(schedule, LRScheduler):
        raise JobError(f"Job.scheduler returned a {type(schedule).__name__}; a torch.optim.lr_scheduler.LRScheduler is needed")
    return schedule


def advance(schedule: LRScheduler, steps: int) -> None:
    """Bring a new schedule to where it stands after so many optimizer steps: it follows their number alone."""
    with warnings.catch_warnings(), user_code(f"Job.scheduler(optimizer) after {steps} steps", JobError):
        # It asks whether the optimizer has made a step; those steps were made by an earlier run.
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)` before")
        for _ in range(steps):
            schedule.step()


def _state_copies(optimizer: Optimizer, group: Mapping[str, Any]) -> int:
    if type(optimizer) is SGD:
        return int(group["momentum"] != 0)
    return 3 if group["amsgrad"] else 2


class RankOptimizer:
    """Run the optimizer of one rank over the buckets that it holds.

    It has the user's groups in the user's order and its learning-rate schedule, which stands at `first_step`. If
    `flat`, it runs on whole buckets, by a fused kernel.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        function: Callable[[NamedParameters], Optimizer],
        scheduler: Callable[[Optimizer], Any] | None,
        first_step: int = 0,
    ):
        self._store = store
        self._members: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        dtype = next((getattr(torch, b.dtype) for b in plan.buckets), torch.float32)
        named = meta_parameters(plan.whole_params, dtype)
        optimizer = call_optimizer(function, named)
        problem = _fused_problem(optimizer, dtype, store.device)
        if problem and store.device != CPU:  # of the CPU it was said when the plan was made
            warn_unfused(optimizer, dtype, problem)
        self.flat = type(optimizer) in ELEMENTWISE and not problem
        if not self.flat:
            self._check_whole(type(optimizer).__name__)
            named = [(n, store.parameter(n) if n in store.grads else p) for n, p in named]
            optimizer = call_optimizer(function, named)
        self._check_groups(optimizer, named)
        if self.flat:
            self._use_flat(optimizer)
        else:
            _one_by_one(optimizer, fused=not problem)
            self._use_views(optimizer, dict(named))
        self._optimizer = optimizer
        self._scheduler = call_scheduler(scheduler, optimizer) if scheduler is not None else None
        if self._scheduler is not None:
            advance(self._scheduler, first_step)

    def _check_whole(self, kind: str) -> None:
        """Raise JobError where ranks share the states of an optimizer that works on whole parameters."""
        shared = [b.id for b in self._store.buckets if b.shard.optim]
        if shared:
            raise JobError(sharding_problem(kind))

    def _check_groups(self, optimizer: Optimizer, named: NamedParameters) -> None:
        group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        for bucket in self._store.buckets:
            for name, p in named:
                if name in bucket.params and group_of.get(id(p)) != bucket.group:
                    raise JobError(
                        f"bucket {bucket.id} was planned for parameter group {bucket.group}, but Job.optimizer puts {name} "
                        f"in group {group_of.get(id(p))}; compile the strategy with this job"
                    )

    def _use_flat(self, optimizer: Optimizer) -> None:
        optimizer.state.clear()
        for index, group in enumerate(optimizer.param_groups):
            group.pop("param_names", None)
            # Which kernel runs is ours to choose: the fused ones hold no temporaries and cost one launch per bucket.
            group["fused"], group["foreach"] = True, False
            group["params"] = [self._store.own_masters[b.id] for b in self._store.buckets if b.group == index]
            for p in group["params"]:
                _first_state(optimizer, group, p)
        for bucket in self._store.buckets:
            self._members[bucket.id] = [(self._store.own_masters[bucket.id], self._store.own_grads[bucket.id])]

    def _use_views(self, optimizer: Optimizer, named: Mapping[str, torch.Tensor]) -> None:
        for group in optimizer.param_groups:
            group.pop("param_names", None)
            group["params"] = [p for p in group["params"] if not p.is_meta]
        for p in [p for p in optimizer.state if p.is_meta]:
            del optimizer.state[p]
        for bucket in self._store.buckets:
            self._members[bucket.id] = [(named[n], self._store.grads[n]) for n in bucket.params]

    def update(self, buckets: Sequence[str], scale: float | torch.Tensor) -> None:
        """Multiply the gradients of these buckets by `scale`, and take one step on their parameters.

        `scale` is a number, or a tensor of one on their device.
        """
        members = [m for b in buckets for m in self._members[b]]
        for p, grad in members:
            p.grad = scaled(grad, scale, p.dtype)
        # Parameters of other buckets have no gradient now, and torch's optimizers skip those.
        self._optimizer.step()
        for p, _ in members:
            p.grad = None
        self._store.copy_masters(buckets)

    def end_step(self) -> None:
        """Advance the learning-rate schedule; once per optimizer step, after all updates."""
        if self._scheduler is not None:
            self._scheduler.step()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of the optimizer, with their present settings."""
        return self._optimizer.param_groups

    @property
    def kinds(self) -> tuple[str, str | None]:
        """Return the class names of the optimizer and of its schedule."""
        return type(self._optimizer).__name__, None if self._scheduler is None else type(self._scheduler).__name__

    @property
    def schedule_state(self) -> dict[str, Any]:
        """Return the state of the schedule, as its state_dict has it; nothing without a schedule."""
        return {} if self._scheduler is None else self._scheduler.state_dict()

    def states(self, bucket: Bucket) -> list[tuple[tuple[str, ...], torch.Tensor, dict[str, Any]]]:
        """Return what the optimizer keeps of a bucket: parameters, the tensor that stands for them, and its state.

        If `flat` that is one entry for all parameters of the bucket, else one entry for each.
        """
        tensors = [p for p, _ in self._members[bucket.id]]
        names = [bucket.params] if self.flat else [(n,) for n in bucket.params]
        return [(of, p, self._optimizer.state[p]) for of, p in zip(names, tensors, strict=True)]

    def state_tensors(self) -> list[torch.Tensor]:
        """Return every tensor of optimizer state on this rank."""
        return [t for state in self._optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]


def sharding_problem(kind: str) -> str:
    """Return the message for an optimizer whose states ranks cannot share."""
    known = ", ".join(c.__name__ for c in ELEMENTWISE)
    return (
        f"replicate(zero=1, 2 or 3) shares the states of the optimizer among ranks, each with a part of every parameter, and "
        f"{kind} works on whole parameters here; use one of {known}, or zero=0"
    )


def scaled(grad: torch.Tensor, scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `grad` multiplied by `scale`, in a dtype: itself, changed in place, where it has this dtype.

    The product is made in the wider of both dtypes.
    """
    if grad.dtype.itemsize < dtype.itemsize:
        grad = grad.to(dtype)
    if not (isinstance(scale, float) and scale == 1.0):  # a tensor is not compared: the host would wait for it
        grad.mul_(scale)
    return grad.to(dtype)


def _first_state(optimizer: Optimizer, group: Mapping[str, Any], p: torch.Tensor) -> None:
    """Make the state that torch would make in the first step, so that memory is the same in all steps."""
    state = optimizer.state[p]
    if type(optimizer) is SGD:
        # With dampening torch starts from the undamped gradient, which no initial buffer reproduces.
        if group["momentum"] != 0 and group["dampening"] == 0:
            state["momentum_buffer"] = torch.zeros_like(p)
        return
    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)  # fused kernels want it beside the parameter
    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
    if group["amsgrad"]:
        state["max_exp_avg_sq"] = torch.zeros_like(p)
