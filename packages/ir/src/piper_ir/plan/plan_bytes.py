"""Count the bytes that the instructions of a plan move: in messages, and in memory for ops without a chunk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from piper_ir.ground.mesh import Mesh
from piper_ir.ground.shards import SharedState
from piper_ir.ground.sizes import ITEM_BYTES, bind
from piper_ir.plan.plan import Bucket, Part, Plan, RolePlan, State
from piper_ir.program.ops import (
    Cast,
    Collective,
    Comm,
    Fold,
    Fresh,
    Recv,
    Send,
    SquaredNorm,
    Update,
)


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
                return nbytes + sum(self._kept(b) for b in buckets)
            case Fresh():
                return nbytes
            case Fold(bucket=bucket):  # reads its value and the kept gradients, and writes these
                return nbytes + 2 * self._kept(bucket)
            case Cast(bucket=bucket) if not part.reads:  # reads the kept gradients and zeroes them
                kept = self._plan.bucket(bucket)
                return nbytes + 2 * bucket_bytes(kept) // self._plan.mesh.degree(kept.shard.grads)
            case Update(buckets=buckets):
                return nbytes + sum(
                    self._updated(s) for s in role.states if s.flat and s.name in buckets
                )
            case _:
                return nbytes

    def _updated(self, state: State) -> int:
        """Return the bytes of a state that an update reads and writes.

        In the shard that this rank's optimizer works on, parameters and optimizer state are read and written, gradients
        are read, and the copy of a master is written. All gradients that the rank has are set to zero.
        """
        own = own_bytes(self._plan, state)
        if state.category == "grad":
            return own + state.nbytes
        copied = state.category == "param" and self._plan.bucket(state.name).mastered
        return own * (1 if copied else 2)

    def _kept(self, bucket: str) -> int:
        """Return the bytes of the gradients of a bucket that the optimizer of a rank sees."""
        kept = self._plan.bucket(bucket)
        return bucket_bytes(kept) // self._plan.mesh.degree(kept.shard.optim)

    def message_bytes(self, op: Comm, part: Part) -> int:
        """Return the bytes of a communication's message: of the sent value, or of the whole tensor of a collective."""
        match op:
            case Collective(bucket=bucket) if bucket:
                return state_message_bytes(self._plan.bucket(bucket), op, self._plan.mesh)
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
        if (
            id(spec) not in self._sizes
        ):  # microbatches share specs: objects that the plan keeps alive
            self._sizes[id(spec)] = bind(spec.nbytes, 0)
        return self._sizes[id(spec)]


def own_bytes(plan: Plan, state: State) -> int:
    """Return the bytes of a bucket's state that the optimizer of a rank works on: all of it, or the rank's part."""
    shard = plan.bucket(state.name).shard
    match state.category:
        case "param" | "master" | "grad":
            return (
                state.nbytes
                * plan.mesh.degree(shard.of(state.category))
                // plan.mesh.degree(shard.optim)
            )
        case _:
            return state.nbytes


def bucket_bytes(bucket: Bucket) -> int:
    """Return the bytes of a bucket's gradients."""
    return bucket.numel * ITEM_BYTES[bucket.accumulate_dtype]


def update_on_host_bytes(buckets: Iterable[Bucket], mesh: Mesh) -> int:
    """Return the most bytes on a rank's host beside the states while some buckets are updated there.

    These are copies of the gradients in the dtype of the update, one of them in the dtype in which it came; afterwards,
    bucket by bucket, a copy of the parameters in the dtype of forward and backward, if that is another one and they are
    on the device.
    """
    held = most = 0
    for bucket in (b for b in buckets if b.host):
        own = bucket.numel // mesh.degree(bucket.shard.optim)
        update, came, sent = (
            own * ITEM_BYTES[d]
            for d in (bucket.dtype, bucket.accumulate_dtype, bucket.compute_dtype)
        )
        held += update
        cast = came if bucket.accumulate_dtype != bucket.dtype else 0
        sends = bucket.compute_dtype != bucket.dtype and not bucket.away
        most = max(most, held + cast, sent if sends else 0)
    return most


def flat_bytes(bucket: Bucket, mesh: Mesh | None = None) -> dict[SharedState, int]:
    """Return the bytes of a bucket's states by category, without the states of the optimizer.

    With a mesh they are the bytes of one rank's shard.
    """
    kinds: tuple[SharedState, ...] = (
        ("param", "master", "grad") if bucket.mastered else ("param", "grad")
    )
    parts = {kind: mesh.degree(bucket.shard.of(kind)) if mesh else 1 for kind in kinds}
    return {kind: bucket.numel * ITEM_BYTES[bucket.dtype_of(kind)] // parts[kind] for kind in kinds}


def state_message_bytes(bucket: Bucket, op: Collective, mesh: Mesh) -> int:
    """Return the bytes of the whole tensor of a collective on a bucket's state."""
    # An all-reduce is among the ranks that keep the same shard.
    one = op.kind == "all_reduce" or op.law.route == "host"
    kept = mesh.degree(bucket.shard.optim) if one else 1
    item = ITEM_BYTES[bucket.compute_dtype if op.law.state == "param" else bucket.reduce_dtype]
    return bucket.numel * item // kept
