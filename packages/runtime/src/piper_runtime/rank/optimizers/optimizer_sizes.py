"""Find how many bytes an optimizer keeps and holds, by steps on meta tensors, which compute nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from piper_ir.ground.errors import JobError
from piper_ops import peak_bytes_inside
from piper_runtime.rank.job.job import NamedParameters
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
            f"holds in one has no known size: {e}"
        ) from e
