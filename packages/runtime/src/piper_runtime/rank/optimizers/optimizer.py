"""Run the user's optimizers on flat buckets.

Element-wise optimizers run on flat tensors: by a fused kernel on one for each bucket if torch has such a kernel, else
on pieces of it. All others run on the parameters of a bucket, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim import SGD, Optimizer

from piper_ir.ground.errors import JobError
from piper_ir.plan.plan import Bucket, Plan
from piper_runtime.rank.job.job import NamedParameters
from piper_runtime.rank.optimizers.fused import warn_unfused
from piper_runtime.rank.optimizers.optimizer_calls import (
    advance,
    call_optimizers,
    call_schedulers,
    keep_from_start,
    meta_parameters,
    names_of,
    one_by_one,
    schedule_state,
)
from piper_runtime.rank.optimizers.optimizer_groups import (
    PIECE,
    given_settings,
    groups_of,
    why_unfused,
)
from piper_runtime.rank.optimizers.optimizer_kinds import ELEMENTWISE, SEPARABLE, TRIED
from piper_runtime.rank.optimizers.optimizer_trials import by_elements, piece_sizes
from piper_runtime.rank.values.device import CPU
from piper_runtime.rank.values.store import bucket_views

if TYPE_CHECKING:
    from piper_runtime.rank.values.store import Store

Way = Literal["fused", "pieces", "parameters"]
"""The tensors that an optimizer runs on: buckets in a fused kernel, pieces of buckets, or parameters one by one."""


@dataclass(frozen=True)
class OptimizerState:
    """Hold an optimizer's state of a tensor that it updates.

    Attributes:
        names: the parameters with elements in the tensor; for a piece, all parameters of the bucket.
        tensor: the tensor with their elements.
        state: the state by key.
        flat: whether the tensor is a part of a bucket, and no parameter.
        first: the first element of the tensor in this rank's part of the bucket.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    state: dict[str, Any]
    flat: bool = False
    first: int = 0


class RankOptimizer:
    """Run the optimizers of one rank over the buckets that it holds; most often there is one.

    They have the user's groups in the user's order and their learning-rate schedules, which stand at `first_step`.
    `flat` says that all run on buckets.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        function: Callable[[NamedParameters], Any],
        scheduler: Callable[[Optimizer], Any] | None,
        first_step: int = 0,
    ):
        self._store = store
        self.rates: tuple[float, ...] = ()
        self._members: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._hosted = {b.id: b for b in store.buckets if b.host}
        dtype = self._dtype = next((getattr(torch, b.dtype) for b in plan.buckets), torch.float32)
        self._again: Callable[[], list[Optimizer]] = lambda: call_optimizers(
            function, meta_parameters(plan.whole_params, dtype)
        )
        named = meta_parameters(plan.whole_params, dtype)
        optimizers = call_optimizers(function, named)
        ways, unfused = zip(
            *(self._way(number, optimizer, dtype) for number, optimizer in enumerate(optimizers)),
            strict=True,
        )
        self.flat = "parameters" not in ways
        self._owner = [k for k, optimizer in enumerate(optimizers) for _ in optimizer.param_groups]
        self._ways: tuple[Way, ...] = ways
        if not self.flat:
            self._check_whole(optimizers)
            on_views = self._on_views()
            named = [(n, store.parameter(n) if n in on_views else p) for n, p in named]
            optimizers = call_optimizers(function, named)
        self._optimizers = optimizers
        self._check_groups(named)
        for number, (optimizer, way) in enumerate(zip(optimizers, ways, strict=True)):
            if way == "parameters":
                one_by_one(optimizer, fused=not unfused[number])
                self._use_views(optimizer)
            else:
                self._use_flat(number, optimizer, way)
        self._members |= {b.id: self._members_of(b, dict(named)) for b in store.buckets}
        self._schedulers = call_schedulers(scheduler, optimizers)
        for schedule in self._schedulers:
            advance(schedule, first_step)

    def _way(self, number: int, optimizer: Optimizer, dtype: torch.dtype) -> tuple[Way, str]:
        """Return the way that an optimizer runs here, and why it does not use a fused kernel that it has."""
        problem = why_unfused(optimizer, dtype, self._store.device)
        if self._hosted and not problem:
            problem = why_unfused(optimizer, dtype, CPU)
        if problem and self._store.device != CPU:  # of the CPU it was said when the plan was made
            warn_unfused(optimizer, dtype, problem)
        if type(optimizer) in ELEMENTWISE and not problem:
            return "fused", ""
        return (
            "pieces" if by_elements(optimizer, lambda: self._again()[number]) else "parameters"
        ), problem

    def _way_of(self, bucket: Bucket) -> Way:
        return self._ways[self._owner[bucket.group]]

    def _on_views(self) -> set[str]:
        """Return the parameters of this rank that are updated one by one."""
        return {n for b in self._store.buckets if self._way_of(b) == "parameters" for n in b.params}

    def _check_whole(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise JobError if ranks share the states of an optimizer that works on whole parameters."""
        for bucket in self._store.buckets:
            if bucket.shard.optim and self._way_of(bucket) == "parameters":
                raise JobError(
                    sharding_problem(type(optimizers[self._owner[bucket.group]]).__name__)
                )

    def _check_groups(self, named: NamedParameters) -> None:
        group_of = {
            id(p): index for index, group in enumerate(self.groups) for p in group["params"]
        }
        for bucket in self._store.buckets:
            for name, p in named:
                if name in bucket.params and group_of.get(id(p)) != bucket.group:
                    raise JobError(
                        f"bucket {bucket.id} was planned for parameter group {bucket.group}, but Job.optimizer "
                        f"puts {name} in group {group_of.get(id(p))}; compile the strategy with this job"
                    )

    def _use_flat(self, number: int, optimizer: Optimizer, way: Way) -> None:
        optimizer.state.clear()
        first = self._owner.index(number)
        if way == "pieces":
            one_by_one(optimizer, fused=False)
        for index, group in enumerate(optimizer.param_groups, first):
            group.pop("param_names", None)
            group["params"] = [
                p for b in self._store.buckets if b.group == index for p in self._pieces(b, way)
            ]
            if way == "fused":
                # Which kernel runs is ours to choose: the fused ones hold no temporaries and cost one launch per
                # bucket.
                group["fused"], group["foreach"] = True, False
                for p in group["params"]:
                    _first_state(optimizer, group, p)
        keep_from_start(optimizer)

    def _pieces(self, bucket: Bucket, way: Way) -> list[torch.Tensor]:
        """Return the tensors that an element-wise optimizer updates; the same ones at each call."""
        known = self._members.get(bucket.id)
        if known is None:
            master, grads = self._store.own_masters[bucket.id], self._store.own_grads[bucket.id]
            known = (
                [(master, grads)]
                if way == "fused"
                else list(zip(master.split(PIECE), grads.split(PIECE), strict=True))
            )
            self._members[bucket.id] = known
        return [p for p, _ in known]

    def _members_of(
        self, bucket: Bucket, named: Mapping[str, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tensors that are updated of a bucket, each with its gradient."""
        if self._way_of(bucket) == "parameters":
            return [(named[n], self._store.grads[n]) for n in bucket.params]
        return self._members[bucket.id]

    def _use_views(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group.pop("param_names", None)
            group["params"] = [p for p in group["params"] if not p.is_meta]
        for p in [p for p in optimizer.state if p.is_meta]:
            del optimizer.state[p]

    def update(
        self,
        buckets: Sequence[str],
        scale: float | torch.Tensor,
        untracked: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Multiply the gradients of these buckets by `scale`, and take one step on their parameters.

        `scale` is a number, or a tensor of one on the device. Memory of the host is taken inside of `untracked`.
        """
        there = [b for b in buckets if b in self._hosted]
        here = [b for b in buckets if b not in self._hosted]
        for p, grad in (m for b in here for m in self._members[b]):
            p.grad = scaled(grad, scale, p.dtype)
        with untracked() if there else nullcontext():
            factor = float(scale) if there else 1.0  # of a device the host waits for it
            copies = [self._use_copy(b, factor) for b in there]  # lent until they are dropped
            # Parameters of other buckets have no gradient now, and torch's optimizers skip those.
            for optimizer in self._optimizers:
                optimizer.step()
            for p, _ in (m for b in buckets for m in self._members[b]):
                p.grad = None
            del copies
            self._store.copy_masters(buckets)

    def _use_copy(self, bucket: str, scale: float) -> torch.Tensor:
        """Copy the gradients of a bucket to the host, for the parameters that are updated there; return the copy."""
        flat = self._store.gradients_on_host(bucket, scale)
        way, members = self._way_of(self._hosted[bucket]), self._members[bucket]
        if way == "parameters":
            own = self._hosted[bucket]
            shapes = [p.shape for p, _ in members]
            grads = [view for _, view in bucket_views(own, flat, shapes)]
        else:
            grads = [flat] if way == "fused" else list(flat.split(PIECE))
        for (p, _), grad in zip(members, grads, strict=True):
            p.grad = grad
        return flat

    def end_step(self) -> None:
        """Advance the learning-rate schedules; once per optimizer step, after all updates.

        `rates` are the learning rates of the groups in this step.
        """
        self.rates = tuple(
            float(group["lr"]) for group in self.groups if isinstance(group.get("lr"), int | float)
        )
        for schedule in self._schedulers:
            schedule.step()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of the optimizers, with their present settings."""
        return list(groups_of(self._optimizers))

    @property
    def job_settings(self) -> list[frozenset[str] | None]:
        """Return for each group the settings that the job gives; None if these are all, as with torch's own."""
        optimizers = [self._optimizers[k] for k in self._owner]
        return [None if type(o) in SEPARABLE else given_settings(o) for o in optimizers]

    @property
    def kinds(self) -> tuple[str, str | None]:
        """Return the class names of the optimizers and of their schedules."""
        return names_of(self._optimizers), names_of(self._schedulers) or None

    @property
    def schedule_state(self) -> Mapping[str, Any]:
        """Return the state of the schedules, as their state_dict has it; nothing without a schedule."""
        return schedule_state(self._schedulers)

    def states(self, bucket: Bucket) -> list[OptimizerState]:
        """Return the optimizer's states of a bucket: of pieces of it, or of each of its parameters."""
        state, tensors = (
            self._optimizers[self._owner[bucket.group]].state,
            [p for p, _ in self._members[bucket.id]],
        )
        if self._way_of(bucket) == "parameters":
            return [
                OptimizerState((name,), p, state[p])
                for name, p in zip(bucket.params, tensors, strict=True)
            ]
        return [
            OptimizerState(bucket.params, p, state[p], True, k * PIECE)
            for k, p in enumerate(tensors)
        ]

    def scalars(self, bucket: Bucket) -> Collection[str]:
        """Return the keys under which one number is kept for a whole piece of a bucket; a fused kernel's is there."""
        number = self._owner[bucket.group]
        if self._ways[number] != "pieces":
            return ()
        within = bucket.group - self._owner.index(number)
        return piece_sizes(lambda: self._again()[number], within, self._dtype).scalars

    def state_tensors(self, *, host: bool = False) -> list[torch.Tensor]:
        """Return every tensor of optimizer state on this rank: on its device, or in the memory of the host."""
        hosted = {id(p) for b in self._hosted for p, _ in self._members[b]}
        kept = [
            state
            for optimizer in self._optimizers
            for p, state in optimizer.state.items()
            if (id(p) in hosted) == host
        ]
        return [t for state in kept for t in state.values() if isinstance(t, torch.Tensor)]


def sharding_problem(kind: str) -> str:
    """Return the message for an optimizer whose states ranks cannot share."""
    known = ", ".join(c.__name__ for c in TRIED)
    return (
        f"replicate(zero=1, 2 or 3) shares the states of the optimizer among ranks, each with a part of every "
        f"parameter, and {kind} works on whole parameters here; use one of {known}, declare it with "
        f"piper.elementwise({kind}) if it updates each element by itself, or use zero=0"
    )


def scaled(grad: torch.Tensor, scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `grad` multiplied by `scale`, in a dtype: itself, changed in place, if it has this dtype.

    The product is made in the wider of both dtypes.
    """
    if grad.dtype.itemsize < dtype.itemsize:
        grad = grad.to(dtype)
    if not (
        isinstance(scale, float) and scale == 1.0
    ):  # a tensor is not compared: the host would wait for it
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
    state["step"] = torch.zeros(
        (), dtype=torch.float32, device=p.device
    )  # fused kernels want it beside the parameter
    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
    if group["amsgrad"]:
        state["max_exp_avg_sq"] = torch.zeros_like(p)
