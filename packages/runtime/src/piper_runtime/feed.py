"""The batch of one rank: the user's function is called once per microbatch, and its tensors wait there until they are loaded."""

from __future__ import annotations

from collections import Counter

import torch

from piper_ir.errors import JobError
from piper_ir.ops import Load
from piper_ir.plan import Plan
from piper_ir.sizes import bind
from piper_runtime.job import Batch, flatten_batch, microbatch_rows


def upload(rows: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A copy of rows on a CUDA device, in this dtype, that the host does not wait for. What the user's function returned is
    copied to pinned memory first, which torch's pool takes back when the device has read it."""
    value = torch.empty(shape, dtype=dtype, device=device)
    if rows.is_cuda:
        return value.copy_(rows)
    staged = torch.empty(shape, dtype=dtype, pin_memory=True).copy_(rows)
    return value.copy_(staged, non_blocking=True)


class Feed:
    """Hands out the rows that one rank computes. What the user's function returned is held until its last tensor is taken; it
    counts as host memory of the input pipeline and not as memory of the plan."""

    def __init__(self, plan: Plan, rank: int, batch: Batch):
        self._plan = plan
        self._batch = batch
        self._replica = plan.replica_of(rank)
        self._specs = {b.name: b.spec.bind(plan.rows) for b in plan.batch}
        ops = [(p.mb, p.op) for i in plan.role_of(rank).program for p in i.parts]
        self._uses = Counter(mb for mb, op in ops if isinstance(op, Load))
        self._left: Counter[int] = Counter()
        self._staged: dict[int, dict[str, torch.Tensor]] = {}
        self.step = 0

    def begin(self, step: int) -> None:
        """Start an optimizer step."""
        self.step = step
        self._left = self._uses.copy()
        self._staged.clear()

    def take(self, name: str, mb: int) -> torch.Tensor:
        """A microbatch's rows of one batch tensor, of the planned shape; the caller copies it. JobError when the batch does not
        fit."""
        if mb not in self._staged:
            rows = microbatch_rows(self._plan, self._replica, mb)
            with torch.enable_grad():
                result = self._batch(self.step, rows)
            if not (isinstance(result, tuple) and len(result) == 2):
                raise JobError(
                    f"Job.batch(step={self.step}, rows={rows}) returned a {type(result).__name__}; "
                    f"a pair (inputs, targets) is needed"
                )
            self._staged[mb] = flatten_batch(*result)
        tensor = self._checked(name, mb)
        self._left[mb] -= 1
        if not self._left[mb]:
            del self._staged[mb]
        return tensor

    def _checked(self, name: str, mb: int) -> torch.Tensor:
        spec, staged = self._specs[name], self._staged[mb]
        call = f"Job.batch(step={self.step}, rows={microbatch_rows(self._plan, self._replica, mb)})"
        if name not in staged:
            raise JobError(f"{call} returned no tensor {name}, which the plan reads; it returned {', '.join(staged)}")
        tensor = staged[name]
        shape = tuple(bind(d, 0) for d in spec.shape)
        if tuple(tensor.shape) != shape:
            raise JobError(f"{call} returned {name} of shape {tuple(tensor.shape)}; the plan was made for {shape}")
        dtype = getattr(torch, spec.dtype)
        if tensor.dtype != dtype and not (tensor.is_floating_point() and dtype.is_floating_point):
            raise JobError(f"{call} returned {name} of {tensor.dtype}; the plan was made for {dtype}")
        return tensor
