"""Check rule R07: the reads and writes of the parts of a plan agree with their ops."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from piper_ir.ground.errors import PlanError
from piper_ir.ground.sizes import ITEM_BYTES, TensorSpec
from piper_ir.plan.plan import Category, is_state
from piper_ir.program.collectives import FROM_HOST
from piper_ir.program.ops import (
    Add,
    Cast,
    Collective,
    Compute,
    Fold,
    Fresh,
    Load,
    Op,
    Recv,
    Seed,
    Send,
    SquaredNorm,
    Update,
    Zeros,
)
from piper_ir.program.program import Chunk
from piper_ir.verify.rules import Findings


class Signatures:
    """Check R07: the reads and writes of the parts of a plan."""

    def __init__(self, findings: Findings) -> None:
        self.plan = plan = findings.plan
        self.columns = findings.columns
        self._batch = {b.name: b.spec.bind(plan.rows) for b in plan.batch}
        self._steps: dict[tuple[str, str], tuple[list[TensorSpec], list[TensorSpec]]] = {}
        self._sizes: dict[str, int] = {}

    def problems(self, row: int) -> Iterable[str]:
        """Yield the problems of the reads and writes of the part in a row."""
        op, mb = self.columns.parts[self.columns.row_part[row]].op, int(self.columns.row_mb[row])
        if isinstance(op, Compute | Load | Seed) and not 0 <= mb < self.plan.microbatches:
            yield f"microbatch {mb} is not in 0..{self.plan.microbatches - 1}"
        elif mb != -1 and _of_step(op):
            yield f"it is an op of the whole step, and names the microbatch {mb}"
        elif not -1 <= mb < self.plan.microbatches:
            yield f"microbatch {mb} is not in -1..{self.plan.microbatches - 1}"
        reads, writes = self.columns.reads.of(row), self.columns.writes.of(row)
        try:
            expected = self._op(op, reads, writes)
        except PlanError as e:
            yield str(e)
            return
        yield from self._compare("reads", reads, expected[0])
        yield from self._compare("writes", writes, expected[1])

    def _spec(self, value: int) -> TensorSpec:
        table = self.columns.table
        return table.kinds[value // table.count][0]

    def _compare(self, verb: str, values: list[int], expected: list[TensorSpec]) -> Iterable[str]:
        if len(values) != len(expected):
            yield f"it {verb} {len(values)} values; {len(expected)} are expected"
            return
        specs = [self._spec(v) for v in values]
        if specs != expected:  # equal objects first, of which microbatches have the same
            for value, actual, spec in zip(values, specs, expected, strict=True):
                if actual != spec:
                    name = self.columns.table.name(value)
                    yield f"it {verb} {name}, a {actual}; {spec} is expected"

    def _step(self, op: Compute) -> tuple[list[TensorSpec], list[TensorSpec]]:
        """Return the tensors that a chunk's step reads and writes; raise PlanError if the chunk has no such step."""
        key = (op.variant, op.step)
        if key not in self._steps:
            chunk = self.plan.chunk(op.variant)
            if op.step not in chunk.steps:
                steps = ", ".join(chunk.steps)
                raise PlanError(
                    f"the step {op.step} does not exist in a plan; chunk {op.chunk} has {steps}"
                )
            sig = chunk.steps[op.step]
            reads = [port_spec(chunk, p) for p in sig.reads if not is_state(chunk, p)]
            self._steps[key] = reads, [port_spec(chunk, p) for p in sig.writes]
        return self._steps[key]

    def _op(
        self, op: Op, read: list[int], written: list[int]
    ) -> tuple[list[TensorSpec], list[TensorSpec]]:
        """Return the tensors that an op reads and writes; ops that take any shape get their first value's."""
        first = [self._spec(v) for v in [*read, *written][:1]] or [TensorSpec((), "float32")]
        reads: list[TensorSpec] = []
        writes: list[TensorSpec] = []
        match op:
            case Load(tensor=tensor):
                writes = [self._batch[tensor]]
            case Seed() | Zeros() | SquaredNorm():
                writes = [_scalar(op, first[0])]
            case Fresh() | Cast() | Fold():
                reads, writes = self._gradients(op, bool(read))
            case Add():
                reads, writes = first * max(1, len(read)), first
            case Send() | Recv():
                reads, writes = (first, []) if isinstance(op, Send) else ([], first)
            case Collective():
                reads, writes = self._collective(op, first)
            case Update():
                scalars = [TensorSpec((), self._spec(v).dtype) for v in read] + first * 2
                reads = scalars[: int(op.weighted) + int(op.normed)]
            case Compute():
                reads, writes = self._step(op)
            case _:
                assert_never(op)
        return reads, writes

    def _gradients(
        self, op: Fresh | Cast | Fold, buffered: bool
    ) -> tuple[list[TensorSpec], list[TensorSpec]]:
        """Return the gradients of a bucket that an op reads and writes: a buffer, kept ones, or this rank's share."""
        shard, mesh = self.plan.bucket(op.bucket).shard, self.plan.mesh
        match op:
            case Fresh():
                return [], [self._flat(op.bucket, "grad")]
            case Cast() if buffered:
                return [self._flat(op.bucket, "grad")], [self._flat(op.bucket, "reduced")]
            case Cast():
                return [], [self._flat(op.bucket, "reduced", mesh.degree(shard.grads))]
            case Fold():
                return [self._flat(op.bucket, "reduced", mesh.degree(shard.optim))], []

    def _flat(self, bucket: str, category: Category, parts: int = 1) -> TensorSpec:
        """Return the size of one of the parts of a bucket, as a value of a category."""
        flat = self.plan.bucket(bucket)
        return TensorSpec((flat.numel // parts,), flat.dtype_of(category))

    def _collective(
        self, op: Collective, first: list[TensorSpec]
    ) -> tuple[list[TensorSpec], list[TensorSpec]]:
        """Return the tensors that a member of a collective reads and writes; raise PlanError if its law forbids it."""
        if not op.bucket:
            return first, [op.law.written(first[0], self._members(op.channel))]
        if not op.law.state:
            raise PlanError(f"{op.law.name} works on values, and it names the bucket {op.bucket}")
        bucket = self.plan.bucket(op.bucket)
        if not (op.law.state == "param" and bucket.lent):
            return [], []
        parts = self.plan.mesh.degree(bucket.shard.params)
        copy = [self._flat(op.bucket, "gathered", parts)] if bucket.away else []
        return ([], copy) if op.kind == FROM_HOST else (copy, [self._flat(op.bucket, "gathered")])

    def _members(self, channel: str) -> int:
        """Return how many ranks meet on a group channel."""
        if channel not in self._sizes:
            group = self.plan.channel(channel)
            self._sizes[channel] = len(
                self.plan.peers(group, self.plan.role(group.roles[0]).ranks[0])
            )
        return self._sizes[channel]


def _scalar(op: Seed | Zeros | SquaredNorm, loss: TensorSpec) -> TensorSpec:
    """Return the number that an op makes; a seed has the loss's shape, which synthetic programs leave empty.

    Raises PlanError for a dtype that does not exist.
    """
    if op.dtype not in ITEM_BYTES:
        raise PlanError(f"there is no dtype {op.dtype}; one of {', '.join(ITEM_BYTES)} is expected")
    return TensorSpec(loss.shape if isinstance(op, Seed) else (), op.dtype)


def _of_step(op: Op) -> bool:
    """Return whether an op stands once in a step: it works on gradients that are complete, or on the optimizer."""
    return isinstance(op, SquaredNorm | Update) or (
        isinstance(op, Collective) and bool(op.bucket) and op.kind == "all_reduce"
    )


def port_spec(chunk: Chunk, port: str) -> TensorSpec:
    """Return the shape and dtype of a port; inputs may be given by the chunk's list of inputs only."""
    return (
        chunk.ports[port]
        if port in chunk.ports
        else chunk.inputs[int(port.removeprefix("in"))].spec
    )
