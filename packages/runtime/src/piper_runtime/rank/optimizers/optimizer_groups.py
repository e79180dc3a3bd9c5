"""Describe a job's optimizers before they run: their groups, the size of their state, and a step's temporaries.

The user's function is called with every parameter at its full shape on meta, so that rules such as "no decay for ndim <
2" see true shapes. Most often it makes one optimizer; the groups of several count through.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.optim import SGD, Muon, Optimizer

from piper_ir.ground.errors import JobError
from piper_ir.ground.sizes import ITEM_BYTES
from piper_ir.plan.plan import Bucket
from piper_ir.program.program import Param
from piper_runtime.rank.job.job import Job, NamedParameters
from piper_runtime.rank.optimizers.fused import fused_problem, warn_unfused
from piper_runtime.rank.optimizers.optimizer_calls import (
    call_optimizers,
    meta_parameters,
    names_of,
    one_by_one,
)
from piper_runtime.rank.optimizers.optimizer_kinds import (
    ELEMENTWISE,
    OF_MATRICES,
    declared_elementwise,
    declared_per_parameter,
    separable,
)
from piper_runtime.rank.optimizers.optimizer_sizes import (
    WholeSteps,
    own_parameters,
    state_bytes,
)
from piper_runtime.rank.optimizers.optimizer_trials import (
    PieceSizes,
    by_elements,
    check_elementwise,
    check_per_parameter,
    piece_sizes,
)
from piper_runtime.rank.values import device as devices
from piper_runtime.rank.values.device import CPU, choose_device

STEP_COUNTER_BYTES = 4
"""The bytes of the float32 step counter of Adam and AdamW, one per tensor."""
PIECE = 2**22
"""The most elements of a bucket that an element-wise optimizer with temporaries updates at once."""


@dataclass(frozen=True)
class GroupSpec:
    """Describe how one group of parameters is updated.

    Attributes:
        kind: the class name of its optimizer.
        owner: the number of its optimizer.
        flat: whether it runs on buckets, and not on their parameters one by one.
        copies: how many values it keeps per element of a bucket, if a fused kernel runs.
        counters: bytes of its step counters for a bucket, if a fused kernel runs.
        piece: the sizes of its state and temporaries for a piece of a bucket, if it updates each element by itself and
            no fused kernel runs.
        matrices: whether it updates each matrix of a parameter by itself.
        newton_schulz: the iterations by which it makes matrices orthogonal; 0 for none.
    """

    kind: str
    owner: int
    flat: bool
    copies: int = 0
    counters: int = 0
    piece: PieceSizes | None = None
    matrices: bool = False
    newton_schulz: int = 0


@dataclass(frozen=True)
class OptimizerSpec:
    """Describe the optimizers of a job before they run.

    Attributes:
        kind: the class names.
        group_of: index of the group of each trained parameter.
        groups: how each group is updated.
        param_bytes: bytes of state per parameter, of groups that are not flat.
        separable: whether each is known to update each parameter by itself.
        whole_bytes: bytes of temporaries in a step over all parameters of groups that are not flat.
        whole_steps: finds these bytes for some of the parameters; None where all count, since it takes torch.
    """

    kind: str
    group_of: Mapping[str, int]
    groups: tuple[GroupSpec, ...]
    param_bytes: Mapping[str, int] = field(default_factory=dict)
    separable: bool = True
    whole_bytes: int = 0
    whole_steps: WholeSteps | None = None

    @property
    def flat(self) -> bool:
        """Return whether all groups run on buckets. A fused kernel that is wrong here does not."""
        return not self.whole

    @property
    def whole(self) -> str:
        """Return the name of an optimizer that works on whole parameters; "" if none does."""
        return next((g.kind for g in self.groups if not g.flat), "")

    @property
    def whole_groups(self) -> frozenset[int]:
        """Return the groups whose parameters are updated one by one."""
        return frozenset(index for index, g in enumerate(self.groups) if not g.flat)

    @property
    def matrix_groups(self) -> frozenset[int]:
        """Return the groups of `whole_groups` that update each matrix of a parameter by itself."""
        return frozenset(index for index, g in enumerate(self.groups) if g.matrices)

    @property
    def newton_schulz(self) -> dict[int, int]:
        """Return by group the iterations by which matrices are made orthogonal, where they are."""
        return {index: g.newton_schulz for index, g in enumerate(self.groups) if g.newton_schulz}

    def state_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of optimizer state that a holder of the bucket keeps.

        For parameters that are updated one by one it counts all matrices of a stack, also if devices share them.
        """
        group = self.groups[bucket.group]
        if group.piece is not None:
            each, beside = group.piece.kept
            return each * bucket.numel + beside * -(-bucket.numel // PIECE)
        if group.flat:
            return group.copies * bucket.numel * ITEM_BYTES[bucket.dtype] + group.counters
        return sum(self.param_bytes[p] for p in bucket.params)

    def update_bytes(self, buckets: Sequence[Bucket]) -> int:
        """Return the most bytes of temporaries in a step of a holder of these buckets; fused kernels hold none."""
        one_by_one = [p for b in buckets if b.group in self.whole_groups for p in b.params]
        of_whole = self.whole_steps.held(one_by_one) if self.whole_steps else self.whole_bytes
        return max((of_whole if one_by_one else 0, *map(_held_by, self._pieces(buckets).values())))

    def _pieces(self, buckets: Sequence[Bucket]) -> dict[int, list[tuple[int, PieceSizes, int]]]:
        """Return by optimizer the pieces that it updates, in order: their groups, sizes and numbers of elements."""
        pieces: dict[int, list[tuple[int, PieceSizes, int]]] = {}
        for bucket in sorted(buckets, key=lambda b: b.group):
            group = self.groups[bucket.group]
            if group.piece is not None:
                numels = [
                    min(PIECE, bucket.numel - first) for first in range(0, bucket.numel, PIECE)
                ]
                pieces.setdefault(group.owner, []).extend(
                    (bucket.group, group.piece, n) for n in numels
                )
        return pieces


def _held_by(pieces: Sequence[tuple[int, PieceSizes, int]]) -> int:
    """Return the most bytes that successive steps on pieces hold; a step still has the last one's leftovers."""
    most = left = 0
    for (group, sizes, numel), (following, *_) in pairwise([*pieces, (-1, *pieces[-1][1:])]):
        most = max(most, left + sizes.held[0] * numel + sizes.held[1])
        each, beside = sizes.left if following == group else sizes.behind
        left = each * numel + beside
    return most


def optimizer_spec(job: Job, params: Sequence[Param]) -> OptimizerSpec:
    """Return the groups of the user's optimizers, from a call of their function on meta parameters.

    Raises JobError when a trained parameter is in no group, or an optimizer cannot run on a plan.
    """
    trained = {p.name for p in params if p.trained}
    dtype = job.precision.dtype
    named = meta_parameters(params, dtype)
    optimizers = call_optimizers(job.make_optimizers, named)
    group_of = _group_of(optimizers, named, trained)
    groups: list[GroupSpec] = []
    param_bytes: dict[str, int] = {}
    one_by_one_fused: dict[int, bool] = {}
    for number, optimizer in enumerate(optimizers):
        problem = planned_problem(optimizer, dtype)
        make = partial(_made_again, job, params, number)
        if declared_per_parameter(optimizer):
            check_per_parameter(make)
        if declared_elementwise(optimizer):
            check_elementwise(make)
        fused = type(optimizer) in ELEMENTWISE and not problem
        if not fused and by_elements(optimizer, make):
            groups += [
                GroupSpec(
                    type(optimizer).__name__, number, True, piece=piece_sizes(make, index, dtype)
                )
                for index in range(len(optimizer.param_groups))
            ]
        elif fused:
            groups += _fused_groups(number, optimizer)
        else:
            one_by_one(optimizer, fused=not problem)
            one_by_one_fused[number] = not problem
            param_bytes |= state_bytes(optimizer, own_parameters(optimizer, named), trained)
            of_matrices = type(optimizer) in OF_MATRICES
            muon = isinstance(optimizer, Muon)
            groups += [
                GroupSpec(
                    type(optimizer).__name__,
                    number,
                    False,
                    matrices=of_matrices,
                    newton_schulz=group["ns_steps"] if muon else 0,
                )
                for group in optimizer.param_groups
            ]
    steps = WholeSteps(job.make_optimizers, params, dtype, one_by_one_fused)
    return OptimizerSpec(
        names_of(optimizers),
        group_of,
        tuple(groups),
        param_bytes,
        all(map(separable, optimizers)),
        steps.held(trained) if one_by_one_fused else 0,
        steps if one_by_one_fused else None,
    )


def state_keys(job: Job, params: Sequence[Param]) -> dict[str, set[str]]:
    """Return the keys of the optimizer state of each trained parameter after a step."""
    trained = {p.name for p in params if p.trained}
    named = meta_parameters(params, job.precision.dtype)
    keys: dict[str, set[str]] = {}
    for optimizer in call_optimizers(job.make_optimizers, named):
        one_by_one(optimizer, fused=False)
        own = own_parameters(optimizer, named)
        state_bytes(optimizer, own, trained)
        keys |= {name: set(optimizer.state[p]) for name, p in own if name in trained}
    return keys


def _made_again(job: Job, params: Sequence[Param], number: int) -> Optimizer:
    return call_optimizers(job.make_optimizers, meta_parameters(params, job.precision.dtype))[
        number
    ]


def _group_of(
    optimizers: Sequence[Optimizer], named: NamedParameters, trained: set[str]
) -> dict[str, int]:
    """Return the index of the group of each trained parameter; raise JobError if one has none."""
    name_of = {id(p): name for name, p in named}
    group_of = {
        name_of[id(p)]: index
        for index, group in enumerate(groups_of(optimizers))
        for p in group["params"]
        if name_of.get(id(p)) in trained
    }
    if missing := sorted(trained - group_of.keys()):
        raise JobError(
            f"Job.optimizer puts {', '.join(missing[:5])}{' and more' if len(missing) > 5 else ''} in no parameter "
            f"group; give every parameter to the optimizer, or set requires_grad=False in the model for those that "
            f"stay as they are"
        )
    return group_of


def given_settings(optimizer: Optimizer) -> frozenset[str]:
    """Return the settings of groups that a job gives an optimizer, which are the parameters of its constructor.

    All others, such as a counter, are its own state.
    """
    own = type(optimizer).__mro__[: type(optimizer).__mro__.index(Optimizer)]
    named = {name for one in own for name in inspect.signature(one).parameters}
    return frozenset({*named, "lr", "initial_lr"})


def groups_of(optimizers: Sequence[Optimizer]) -> Iterator[dict[str, Any]]:
    """Yield the groups of all optimizers, in order."""
    for optimizer in optimizers:
        yield from optimizer.param_groups


def planned_problem(optimizer: Optimizer, dtype: torch.dtype) -> str:
    """Return why a plan does not use a fused kernel, and warn of it; an empty text if it does.

    A kernel on a CUDA device is tried by its rank: the process that makes a plan must not hold memory there.
    """
    device = choose_device(devices.default, 0)
    problem = why_unfused(optimizer, dtype, device if device == CPU else None)
    if problem:
        warn_unfused(optimizer, dtype, problem)
    return problem


def why_unfused(optimizer: Optimizer, dtype: torch.dtype, device: torch.device | None) -> str:
    """Return why the fused kernel of an element-wise optimizer is not used on a device; an empty text if it is."""
    if device is None or type(optimizer) not in ELEMENTWISE:
        return ""
    return fused_problem(optimizer, dtype, device)


def _fused_groups(number: int, optimizer: Optimizer) -> list[GroupSpec]:
    counters = 0 if type(optimizer) is SGD else STEP_COUNTER_BYTES
    kind = type(optimizer).__name__
    return [
        GroupSpec(kind, number, True, _state_copies(optimizer, group), counters)
        for group in optimizer.param_groups
    ]


def _state_copies(optimizer: Optimizer, group: Mapping[str, Any]) -> int:
    if type(optimizer) is SGD:
        return int(group["momentum"] != 0)
    return 3 if group["amsgrad"] else 2
