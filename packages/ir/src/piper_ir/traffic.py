"""Bytes that the instructions of a plan move: messages, and memory touched by what is not a chunk."""

from __future__ import annotations

from piper_ir.ops import AllReduce, Comm, Recv, SquaredNorm, Update
from piper_ir.plan import Bucket, Part, Plan, RolePlan
from piper_ir.sizes import ITEM_BYTES, bind


class Traffic:
    """Of one plan; sizes that many values share are computed once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._sizes: dict[int, int] = {}

    def touched(self, role: RolePlan, part: Part) -> int:
        """Bytes of memory that an op other than Compute reads and writes."""
        nbytes = sum([self.nbytes(v) for v in (*part.reads, *part.writes)])
        match part.op:
            case SquaredNorm(buckets=buckets):
                return nbytes + sum(bucket_bytes(self._plan.bucket(b)) for b in buckets)
            case Update(buckets=buckets):  # reads and writes parameters, optimizer state and (to zero it) the gradient
                names = {f"{kind}:{b}" for b in buckets for kind in ("param", "grad", "optim")}
                return nbytes + 2 * sum(s.nbytes for s in role.states if s.id in names)
            case _:
                return nbytes

    def message(self, op: Comm, part: Part) -> int:
        """Bytes of a communication's message on one rank."""
        if isinstance(op, AllReduce) and op.bucket:
            return bucket_bytes(self._plan.bucket(op.bucket))
        return sum([self.nbytes(v) for v in (part.writes if isinstance(op, Recv) else part.reads)])

    def nbytes(self, value: str) -> int:
        spec = self._plan.values[value].spec
        if id(spec) not in self._sizes:  # microbatches share specs: objects that the plan keeps alive
            self._sizes[id(spec)] = bind(spec.nbytes, 0)
        return self._sizes[id(spec)]


def bucket_bytes(bucket: Bucket) -> int:
    """Bytes of a bucket's gradients."""
    return bucket.numel * ITEM_BYTES[bucket.dtype]
