"""Call a job's batch function, and take apart by path the batch that it returns."""

from __future__ import annotations

from typing import Any

import torch

from piper_ir.ground.errors import JobError
from piper_ir.plan.plan import Plan
from piper_ir.tools import user_code
from piper_ops import Constant, batch_leaves, batch_pair
from piper_runtime.rank.job.job import Batch


def microbatch_rows(plan: Plan, replica: int, microbatch: int) -> range:
    """Return the rows of the global batch that a data-parallel replica computes in a microbatch.

    Replica i owns rows [i*G/D, (i+1)*G/D), in order.
    """
    start = (replica * plan.microbatches + microbatch) * plan.rows
    return range(start, start + plan.rows)


def call_batch(batch: Batch, step: int, rows: range) -> Any:
    """Return the result of the user's batch function outside of a run.

    Raises JobError when it raises; in a run an ExecutionError has the step and rank.
    """
    with user_code(f"Job.batch(step={step}, rows={rows})", JobError):
        return batch(step, rows)


def flatten_batch(result: object) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the constants in a return value of Job.batch, by their paths in it.

    Paths are "inputs" (a single tensor), "inputs.0", "inputs.mask", "targets", "targets.0.y". None is left out, and
    constants are texts. Raises JobError unless it is a pair or mapping of tensors, numbers, bools, texts and None.
    """
    pair = batch_pair(result)
    if pair is None:
        raise JobError(
            f"Job.batch returned a {type(result).__name__}; a pair (inputs, targets) is needed, or a mapping or "
            f"dataclass"
        )
    tensors: dict[str, torch.Tensor] = {}
    constants: dict[str, str] = {}
    for name, leaf in batch_leaves(*pair):
        if isinstance(leaf, torch.Tensor):
            tensors[name] = leaf
        elif isinstance(leaf, Constant):
            constants[name] = repr(leaf)
        else:
            raise JobError(
                f"Job.batch returned a {type(leaf).__name__} at {name}; only tensors, numbers, bools, texts and "
                f"None are accepted"
            )
    return tensors, constants
