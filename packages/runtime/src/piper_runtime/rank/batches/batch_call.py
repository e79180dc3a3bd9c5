"""Call a job's batch function for the microbatches of one rank, and check its return value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from piper_ir.ground.errors import JobError
from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Load
from piper_ops import batch_pair
from piper_runtime.rank.batches.batches import flatten_batch, microbatch_rows
from piper_runtime.rank.job.job import Batch


@dataclass(frozen=True)
class TensorLook:
    """Hold the shape and dtype that a plan was made for, of one batch tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class BatchCall:
    """Hold a batch function with all facts to call it for one rank, without the plan.

    Attributes:
        rows: the rows of each microbatch, in the order of the rank's first loads.
        names: the tensors of each microbatch that the rank loads, or counts in.
        looks: shape and dtype of each tensor.
        constants: the function's further return values, equal in every call.
        field: the field of the job that the function is.
    """

    batch: Batch
    rows: dict[int, range]
    names: dict[int, tuple[str, ...]]
    looks: dict[str, TensorLook]
    constants: tuple[tuple[str, str], ...] = ()
    field: str = "batch"

    def __call__(self, step: int, mb: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a microbatch that the rank loads, as the user's function made them.

        Raises JobError when they do not fit the plan.
        """
        rows = self.rows[mb]
        call = f"Job.{self.field}(step={step}, rows={rows})"
        with torch.enable_grad():
            result = self.batch(step, rows)
        if batch_pair(result) is None:
            raise JobError(
                f"{call} returned a {type(result).__name__}; a pair (inputs, targets) is needed, "
                f"or a dict of inputs"
            )
        tensors, constants = flatten_batch(result)
        if constants != dict(self.constants):
            self._refuse_constants(call, constants)
        return {name: self._fitted(call, rows, name, tensors) for name in self.names[mb]}

    def _refuse_constants(self, call: str, constants: Mapping[str, str]) -> None:
        planned = dict(self.constants)
        name = next(n for n in {**planned, **constants} if planned.get(n) != constants.get(n))
        now, before = constants.get(name, "nothing"), planned.get(name, "nothing")
        raise JobError(
            f"{call} returned {name}={now}; the plan was made for {before}. What is no tensor is a constant of the "
            f"captured model, the same in every call; return a tensor where it changes"
        )

    def _fitted(
        self, call: str, rows: range, name: str, found: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return a tensor in the planned shape; its first two dimensions may be one in the user's."""
        look = self.looks[name]
        if name not in found:
            raise JobError(
                f"{call} returned no tensor {name}, which the plan reads; it returned {', '.join(found)}"
            )
        tensor = found[name]
        if len(look.shape) > 1 and tuple(tensor.shape) == (
            look.shape[0] * look.shape[1],
            *look.shape[2:],
        ):
            tensor = tensor.view(look.shape)
        if tuple(tensor.shape) != look.shape:
            raise JobError(
                f"{call} returned {name} of shape {tuple(tensor.shape)}; the plan was made for "
                f"{look.shape}. " + _way_out(tuple(tensor.shape), look.shape, len(rows))
            )
        if tensor.dtype != look.dtype and not (
            tensor.is_floating_point() and look.dtype.is_floating_point
        ):
            raise JobError(
                f"{call} returned {name} of {tensor.dtype}; the plan was made for {look.dtype}"
            )
        return tensor


def _way_out(shape: tuple[int, ...], planned: tuple[int, ...], rows: int) -> str:
    """Return advice for a batch tensor of another shape than planned."""
    if shape[1:] == planned[1:] and shape:
        return (
            f"A call returns its rows and no others, here {rows}: a last batch of fewer rows is left out, or "
            f"filled up with rows that count nothing (ignore_index, a weight of 0)"
        )
    return (
        "A plan is for one shape: pad or cut to it (with a mask, or ignore_index in the targets), or compile a "
        "plan for each length"
    )


def batch_call(plan: Plan, rank: int, batch: Batch) -> BatchCall:
    """Return the calls of a batch function that one rank of a plan makes."""
    replica = plan.replica_of(rank)
    names: dict[int, dict[str, None]] = {}
    counts = {b.name: b.counts for b in plan.batch if b.counter}
    for part in (p for instr in plan.role_of(rank).program for p in instr.parts):
        if isinstance(part.op, Load):
            names.setdefault(part.mb, {}).update(
                dict.fromkeys(counts.get(part.op.tensor, (part.op.tensor,)))
            )
    specs = {b.name: b.spec.bind(plan.rows) for b in plan.batch}
    looks = {
        n: TensorLook(tuple(bind(d, 0) for d in s.shape), getattr(torch, s.dtype))
        for n, s in specs.items()
    }
    rows = {mb: microbatch_rows(plan, replica, mb) for mb in names}
    loaded = {mb: tuple(own_names) for mb, own_names in names.items()}
    return BatchCall(
        batch, rows, loaded, looks, plan.constants, "eval_data" if plan.evaluates else "batch"
    )
