"""Give a rank its batch: call the user's function once per microbatch, and keep its tensors until they are loaded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

import torch

from piper_ir.errors import JobError
from piper_ir.ops import Load
from piper_ir.plan import Plan
from piper_ir.sizes import bind
from piper_runtime.rank.job import Batch, flatten_batch, microbatch_rows


def upload(rows: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a copy of rows on a CUDA device, in this dtype, without making the host wait.

    The user's tensors are copied to pinned memory first, which torch's pool takes back when the device has read it.
    """
    value = torch.empty(shape, dtype=dtype, device=device)
    if rows.is_cuda:
        return value.copy_(rows)
    staged = torch.empty(shape, dtype=dtype, pin_memory=True).copy_(rows)
    return value.copy_(staged, non_blocking=True)


class Feed:
    """Hand out the rows that one rank computes, a tensor at a time.

    A batch function may refill the tensors that it returned before. So tensors for later are copied at once, and none
    of the user's is held between two calls. The copies count as host memory of the input pipeline, not as memory of the
    plan. `waits` has, per call of the function in this step, the microbatch, and when it began and ended by
    time.perf_counter.
    """

    def __init__(self, plan: Plan, rank: int, batch: Batch):
        self._plan = plan
        self._batch = batch
        self._replica = plan.replica_of(rank)
        self._specs = {b.name: b.spec.bind(plan.rows) for b in plan.batch}
        ops = [(p.mb, p.op) for i in plan.role_of(rank).program for p in i.parts]
        self._uses = Counter((mb, op.tensor) for mb, op in ops if isinstance(op, Load))
        self._left: Counter[tuple[int, str]] = Counter()
        self._names: dict[int, list[str]] = {}
        for mb, name in self._uses:
            self._names.setdefault(mb, []).append(name)
        self._staged: dict[int, dict[str, torch.Tensor]] = {}
        self.waits: list[tuple[int, float, float]] = []
        self.step = 0

    def begin(self, step: int) -> None:
        """Start an optimizer step."""
        self.step = step
        self._left = self._uses.copy()
        self._staged.clear()
        self.waits.clear()

    def take(self, name: str, mb: int) -> torch.Tensor:
        """Return a microbatch's rows of one batch tensor, of the planned shape.

        The caller copies it before it takes another. Raises JobError when the batch does not fit.
        """
        self._left[mb, name] -= 1
        staged = self._staged.setdefault(mb, {})
        if name in staged:
            tensor = staged[name]
        else:
            fresh = self._called(mb, name)
            tensor = fresh[name]
            staged.update({n: self.kept(t) for n, t in fresh.items() if self._left[mb, n] > 0})
        if self._left[mb, name] <= 0:
            staged.pop(name, None)
        return tensor

    @staticmethod
    def kept(tensor: torch.Tensor) -> torch.Tensor:
        """Return what is held of a tensor of the user's until it is loaded."""
        return tensor.detach().clone()

    def _called(self, mb: int, wanted: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a microbatch that this rank loads, as the user's function made them."""
        rows = microbatch_rows(self._plan, self._replica, mb)
        call = f"Job.batch(step={self.step}, rows={rows})"
        start = time.perf_counter()
        with torch.enable_grad():
            result = self._batch(self.step, rows)
        self.waits.append((mb, start, time.perf_counter()))
        if not (isinstance(result, tuple) and len(result) == 2):
            raise JobError(f"{call} returned a {type(result).__name__}; a pair (inputs, targets) is needed")
        found = flatten_batch(*result)
        names = dict.fromkeys([wanted, *self._names.get(mb, ())])
        for name in names:
            self._check(call, name, found)
        return {name: found[name] for name in names}

    def _check(self, call: str, name: str, found: Mapping[str, torch.Tensor]) -> None:
        spec = self._specs[name]
        if name not in found:
            raise JobError(f"{call} returned no tensor {name}, which the plan reads; it returned {', '.join(found)}")
        tensor = found[name]
        shape = tuple(bind(d, 0) for d in spec.shape)
        if tuple(tensor.shape) != shape:
            raise JobError(f"{call} returned {name} of shape {tuple(tensor.shape)}; the plan was made for {shape}")
        dtype = getattr(torch, spec.dtype)
        if tensor.dtype != dtype and not (tensor.is_floating_point() and dtype.is_floating_point):
            raise JobError(f"{call} returned {name} of {tensor.dtype}; the plan was made for {dtype}")
