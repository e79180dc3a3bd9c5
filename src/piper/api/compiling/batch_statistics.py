"""Check a strategy against the batch norms that take statistics of microbatches, and name these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from piper_ir.ground.errors import CompileError
from piper_ir.tools import count_text

if TYPE_CHECKING:
    from piper_capture import Captured
    from piper_ir.plan.plan import Plan
    from piper_ir.program.layout import Sharding
    from piper_ops import BatchNorm
    from piper_runtime import Job

MICROBATCH = "microbatch"
"""The value of Job.batch_norm that takes statistics of each microbatch."""


def averages_of(job: Job, captured: Captured) -> frozenset[str] | None:
    """Return the buffers that forward only updates, whose replicas may differ; None if a job allows none."""
    if job.batch_norm != MICROBATCH:
        return None
    return frozenset(a.name for a in captured.advancing if not a.read)


def check_shared_norms(norms: Sequence[BatchNorm], shardings: Sequence[Sharding]) -> None:
    """Raise CompileError if devices would share the rows, tokens or channels of batch statistics."""
    if norms and shardings:
        raise CompileError(
            f"shard: the model takes batch statistics ({norms[0].line}), which devices that share its chunks "
            f"cannot add up; leave shard out, or use LayerNorm, RMSNorm or GroupNorm"
        )


def check_rows(norms: Sequence[BatchNorm], plan: Plan) -> None:
    """Raise CompileError if a microbatch has one value per channel, which has no variance."""
    single = next((norm for norm in norms if norm.single), None)
    if single is not None and plan.rows == 1:
        raise CompileError(
            f"batch statistics of one value per channel ({single.line}): a microbatch has 1 row, and plain PyTorch "
            f"refuses that as well; use fewer microbatches or replicas, or a larger global batch"
        )


def statistics_note(norms: Sequence[BatchNorm], plan: Plan) -> str:
    """Return the note of `explain` on batch statistics; "" if there are none."""
    if not norms:
        return ""
    lines = list(dict.fromkeys(norm.line for norm in norms))
    more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
    copies = f"of replica 0 of {plan.replicas}" if plan.replicas > 1 else "the only ones"
    return (
        f"batch statistics ({', '.join(lines[:3])}{more}) are those of each microbatch of {count_text(plan.rows, 'row')} on its "
        f"replica, as gradient accumulation in plain PyTorch has them; running averages are {copies}, in the order "
        f"of microbatches"
    )
