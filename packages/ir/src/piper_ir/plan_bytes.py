"""Count the bytes that the instructions of a plan move: in messages, and in memory for ops without a chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from piper_ir.ops import Collective, Comm, Recv, Send, SquaredNorm, Update
from piper_ir.plan import Bucket, Category, Part, Plan, RolePlan, State
from piper_ir.sizes import ITEM_BYTES, bind


class PlanBytes:
    """Count the bytes of one plan; sizes that many values share are computed once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._sizes: dict[int, int] = {}

    def memory_bytes(self, role: RolePlan, part: Part) -> int:
        """Return the bytes of memory that an op other than Compute reads and writes."""
        nbytes = sum([self.nbytes(v) for v in (*part.reads, *part.writes)])
        match part.op:
            case SquaredNorm(buckets=buckets):
                return nbytes + sum(bucket_bytes(self._plan.bucket(b)) for b in buckets)
            case Update(buckets=buckets):
                return nbytes + sum(self._updated(s) for s in role.states if s.flat and s.name in buckets)
            case _:
                return nbytes

    def _updated(self, state: State) -> int:
        """Return the bytes of a state that an update reads and writes.

        Parameters, optimizer state and (to zero it) the gradient are read and written; the copy of a master is written.
        """
        copied = state.category == "param" and self._plan.bucket(state.name).mastered
        return state.nbytes * (1 if copied else 2)

    def message_bytes(self, op: Comm, part: Part) -> int:
        """Return the bytes of a communication's message: of the sent value, or of the whole tensor of a collective."""
        match op:
            case Collective(bucket=bucket) if bucket:
                return bucket_bytes(self._plan.bucket(bucket))
            case Send():
                message = part.reads
            case Recv():
                message = part.writes
            case Collective():
                message = part.reads if op.law.reads == "whole" else part.writes
            case _:
                assert_never(op)
        return sum(map(self.nbytes, message))

    def nbytes(self, value: str) -> int:
        """Return the bytes of a value."""
        spec = self._plan.values[value].spec
        if id(spec) not in self._sizes:  # microbatches share specs: objects that the plan keeps alive
            self._sizes[id(spec)] = bind(spec.nbytes, 0)
        return self._sizes[id(spec)]


def bucket_bytes(bucket: Bucket) -> int:
    """Return the bytes of a bucket's gradients."""
    return bucket.numel * ITEM_BYTES[bucket.reduce_dtype]


def flat_bytes(bucket: Bucket) -> Mapping[Category, int]:
    """Return the bytes of a bucket's states by category, without those of the optimizer."""
    dtypes: dict[Category, str] = {"param": bucket.compute_dtype}
    dtypes |= {"master": bucket.dtype} if bucket.mastered else {}
    dtypes["grad"] = bucket.reduce_dtype
    return {category: bucket.numel * ITEM_BYTES[dtype] for category, dtype in dtypes.items()}
