"""Find how many bytes an optimizer keeps and holds, by steps on meta tensors, which compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from piper_ir.ground.errors import JobError
from piper_ir.program.program import Param
from piper_ops import peak_bytes_inside
from piper_runtime.rank.job.job import NamedParameters
from piper_runtime.rank.optimizers.optimizer_calls import (
    call_optimizers,
    meta_parameters,
    one_by_one,
)
from piper_runtime.rank.optimizers.optimizer_kinds import KEEPS_TO


class NumbersOfMeta(TorchDispatchMode):
    """Answer `.item()` on meta tensors: some optimizers ask for a number, and sizes do not depend on it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


def state_bytes(optimizer: Optimizer, named: NamedParameters, trained: set[str]) -> dict[str, int]:
    """Return the bytes of state per trained parameter after one step; raise JobError if the step is impossible."""
    for name, p in named:
        p.grad = torch.empty_like(p) if name in trained else None
    try:
        with NumbersOfMeta():
            optimizer.step()
    except Exception as e:  # an optimizer of the user's may fail in any way
        raise JobError(
            f"Job.optimizer: {type(optimizer).__name__} cannot take a step on meta tensors, so its state has no "
            f"known size: {e}. An optimizer works on a plan if {KEEPS_TO}"
        ) from e
    return {
        name: sum(t.nbytes for t in optimizer.state[p].values() if isinstance(t, torch.Tensor))
        for name, p in named
        if name in trained
    }


def own_parameters(optimizer: Optimizer, named: NamedParameters) -> NamedParameters:
    """Return the named parameters that an optimizer has, in the model's order."""
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [(name, p) for name, p in named if id(p) in ids]


@dataclass
class WholeSteps:
    """Find the temporaries of a step that updates some parameters one by one: each one's outlive the next one's.

    Attributes:
        function: makes the job's optimizers.
        params: all parameters of the model.
        dtype: their dtype in the update.
        fused: which of the optimizers update parameters one by one, and whether a fused kernel may do so.
    """

    function: Callable[[NamedParameters], Any]
    params: Sequence[Param]
    dtype: torch.dtype
    fused: dict[int, bool]
    _steps: dict[frozenset[str], int] = field(default_factory=dict)
    _optimizers: list[tuple[Optimizer, NamedParameters]] = field(default_factory=list)

    def held(self, names: Collection[str]) -> int:
        """Return the bytes of temporaries in a second step; raise JobError when it cannot be taken."""
        chosen = frozenset(names)
        if chosen not in self._steps:
            self._steps[chosen] = max(self._step(o, named, chosen) for o, named in self._ready())
        return self._steps[chosen]

    def _step(self, optimizer: Optimizer, named: NamedParameters, chosen: frozenset[str]) -> int:
        for name, p in named:
            p.grad = torch.empty_like(p) if name in chosen else None
        return step_bytes(optimizer, named)

    def _ready(self) -> list[tuple[Optimizer, NamedParameters]]:
        """Return each optimizer that updates parameters one by one, after its first step, with its parameters."""
        if not self._optimizers:
            named = meta_parameters(self.params, self.dtype)
            optimizers = call_optimizers(self.function, named)
            trained = {p.name for p in self.params if p.trained}
            for number, fused in self.fused.items():
                one_by_one(optimizers[number], fused=fused)
                own = own_parameters(optimizers[number], named)
                state_bytes(optimizers[number], own, trained)
                self._optimizers.append((optimizers[number], own))
        return self._optimizers


def step_bytes(optimizer: Optimizer, named: NamedParameters) -> int:
    """Return the bytes of temporaries in a step after `state_bytes`; raise JobError when it cannot be taken."""
    known = [
        *(p.grad for _, p in named),
        *(t for of in optimizer.state.values() for t in of.values() if isinstance(t, torch.Tensor)),
    ]
    try:
        with NumbersOfMeta():
            return peak_bytes_inside(lambda *_: optimizer.step(), *(p for _, p in named), *known)
    except Exception as e:  # an optimizer of the user's may fail in any way
        raise JobError(
            f"Job.optimizer: {type(optimizer).__name__} cannot take a second step on meta tensors, so what it "
            f"holds in one has no known size: {e}. An optimizer works on a plan if {KEEPS_TO}"
        ) from e
