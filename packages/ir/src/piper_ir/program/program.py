"""Describe a captured model with its loss as a Program: chunks with exact sizes and costs, without code.

Chunks stand in program order, a topological order of the forward DAG. A chunk has up to three *steps*: F (forward), I
(input gradient) and W (weight gradient). Under a policy of recomputation there is a fourth, R, which recomputes the
tensors that F does not keep before I and W need them. With compiled kernels there may be B, which does the work of R, I
and W in one, for backwards that run them together. A step's Signature names the *ports* that it reads and writes:

    in{k}     the k-th entry of chunk.inputs: a value of another chunk, a parameter, a buffer or a batch tensor
    out{k}    the k-th entry of chunk.outputs
    saved{k}  kept by F for I or W, or made again by R
    tan{k}    gradient of out{k}, for outputs with needs_grad
    gin{k}    gradient of in{k}, for inputs of kind "value" with needs_grad
    iw{k}     handed from I to W

Every port that a step writes owns its bytes and is contiguous: no port aliases another, or a parameter. Code lives
outside the IR, in a store keyed by Chunk.code; its functions take the tensors of `reads` in order followed by one
gradient accumulator per entry of `accumulates`, and return the tensors of `writes` in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from piper_ir.ground.content import content_key
from piper_ir.ground.draws import Draw
from piper_ir.ground.errors import FormatError
from piper_ir.ground.sizes import Dim, TensorSpec, bind
from piper_ir.program.layout import Layout, StepCollective
from piper_ir.program.liveness import Inside as Inside
from piper_ir.program.liveness import Liveness as Liveness
from piper_ir.program.ops import KEEP_ALL, variant_name
from piper_ir.program.ops import Step as Step

LossKind = Literal["mean", "sum", "total"]
KernelKind = Literal["matmul", "attention", "norm", "elementwise", "embedding", "loss", "other"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """Describe equal kernels.

    Attributes:
        kind: the class of operation.
        dims: (M, N, K) for a matmul, with the batch folded into M when the right operand is shared, else (batch, M, N,
            K); (batch, heads, T_q, T_k, head_dim) for attention; (rows, classes) for cross-entropy; (outer, length,
            inner) for a running sum along a dimension; empty for all others.
        dtype: the dtype in which they compute.
        bytes: bytes that one kernel reads and writes.
        count: how many there are.
        lowering: the implementation that flops and bytes assume, if the op has several that differ in them, else "".
        op: the operator's name, without the namespace aten or piper and without the _ of an in-place op.
        formula: False if the FLOPs of this op are unknown, and one per element is counted.
        shared: the number of devices that share the work; this kernel is the share of one.
        counts: how often its products count in model FLOPs: twice for a block below the diagonal of causal attention.
    """

    kind: KernelKind
    dims: tuple[Dim, ...]
    dtype: str
    flops: Dim
    bytes: Dim
    count: int = 1
    lowering: str = ""
    op: str = ""
    formula: bool = True
    shared: int = 1
    counts: int = 1

    @property
    def rows_dim(self) -> int | None:
        """Return the place in `dims` of the rows that a grouped product shares out among experts; None for others."""
        if self.kind != "matmul" or len(self.dims) != 3 or "grouped_mm" not in self.op:
            return None
        return 2 if self.op.endswith("_wgrad") else 0

    def bind(self, rows: int) -> Kernel:
        """Return the kernels at a number of rows."""
        dims = tuple(bind(d, rows) for d in self.dims)
        rest = self.count, self.lowering, self.op, self.formula, self.shared, self.counts
        return Kernel(
            self.kind, dims, self.dtype, bind(self.flops, rows), bind(self.bytes, rows), *rest
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """Describe the work of a step on a device; `seconds`, which only synthetic programs set, overrules the kernels."""

    kernels: tuple[Kernel, ...] = ()
    seconds: float | None = None

    @property
    def flops(self) -> int:
        """Return the total FLOPs of a bound cost."""
        return sum(bind(k.flops, 0) * k.count for k in self.kernels)

    @property
    def bytes(self) -> int:
        """Return the total bytes that a bound cost moves."""
        return sum(bind(k.bytes, 0) * k.count for k in self.kernels)

    def bind(self, rows: int) -> Cost:
        """Return the cost at a number of rows."""
        return Cost(tuple(k.bind(rows) for k in self.kernels), self.seconds)


@dataclass(frozen=True, slots=True)
class ExpertRegion:
    """Describe dropless experts that devices share, in one step: a device computes the rows of all for its experts.

    It has a fixed number of places for them. Rows above go in further rounds, as many as a load of experts asks for.

    Attributes:
        rows: the rows that a device's experts have if all devices' experts have equally many.
        places: the places for rows.
        round: the work of a further round that fills all places; no kernels where no further rounds run.

    FormatError unless there is at least one row and one place.
    """

    rows: Dim
    places: Dim
    round: Cost = Cost()

    def __post_init__(self) -> None:
        for name, size in (("rows", self.rows), ("places", self.places)):
            if bind(size, 1) < 1:
                raise FormatError(
                    f"an ExpertRegion has {name} {size}; experts have at least one row, and a place for it"
                )

    @property
    def bound(self) -> float:
        """Return the places over the rows on average, about the `bound` of a strategy; sizes must be bound."""
        return bind(self.places, 0) / bind(self.rows, 0)

    def bind(self, rows: int) -> ExpertRegion:
        """Return the experts at a number of rows of a microbatch."""
        return ExpertRegion(bind(self.rows, rows), bind(self.places, rows), self.round.bind(rows))


@dataclass(frozen=True, slots=True)
class OverlappedCollective:
    """Describe a collective that is under way while its step computes.

    Attributes:
        number: its place among the step's collectives.
        beside: the kernels that run between its start and the wait for it; they are a part of the step's.
    """

    number: int
    beside: Cost

    def bind(self, rows: int) -> OverlappedCollective:
        """Return it at a number of rows."""
        return OverlappedCollective(self.number, self.beside.bind(rows))


@dataclass(frozen=True, slots=True)
class Signature:
    """Describe one step of one chunk.

    Attributes:
        reads: ports that the step reads.
        writes: ports that the step writes.
        accumulates: indexes into chunk.inputs of the parameters to whose gradient accumulators the step adds; a
            parameter may be listed once only.
        cost: the work of the step on a device.
        liveness: the memory that the step holds while it runs.
        collectives: the collectives of the step among devices that share the chunk, in order.
        experts: the dropless experts that devices share; None for any other step.
        overlaps: the collectives that are under way while the step computes, in order, one at a time; the step waits
            for all others where it starts them.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    accumulates: tuple[int, ...] = ()
    cost: Cost = Cost()
    liveness: Liveness = Liveness()  # noqa: RUF009 - frozen, so sharing one is safe
    collectives: tuple[StepCollective, ...] = ()
    experts: ExpertRegion | None = None
    overlaps: tuple[OverlappedCollective, ...] = ()

    def bind(self, rows: int) -> Signature:
        """Return the step at a number of rows."""
        inside = tuple([c.bind(rows) for c in self.collectives])
        return Signature(
            self.reads,
            self.writes,
            self.accumulates,
            self.cost.bind(rows),
            self.liveness.bind(rows),
            inside,
            None if self.experts is None else self.experts.bind(rows),
            tuple([o.bind(rows) for o in self.overlaps]),
        )

    @property
    def empty(self) -> bool:
        """Return whether the step has no effect (the first stage's I, a frozen chunk's W) and no given duration.

        Such a step gets no instruction.
        """
        return not self.writes and not self.accumulates and self.cost.seconds is None


@dataclass(frozen=True, slots=True)
class Input:
    """Describe an input of a chunk.

    Attributes:
        ref: "chunk:out0" for a value, else the name of the parameter, buffer or batch tensor.
        needs_grad: whether its gradient is wanted.
    """

    kind: Literal["value", "param", "buffer", "batch"]
    ref: str
    spec: TensorSpec
    needs_grad: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """Describe an output of a chunk.

    Attributes:
        kind: "buffer" for the new content of a buffer; "value"; the others are scalars of the last chunk.
        ref: the name of the buffer or of the metric.
        needs_grad: whether the step I reads a tangent for it.
        varies: whether that buffer's content depends on the batch.
    """

    kind: Literal["value", "buffer", "loss", "weight", "metric", "metric_weight", "metric_total"]
    spec: TensorSpec
    ref: str = ""
    needs_grad: bool = False
    varies: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """Describe the finest unit of compute.

    Attributes:
        id: an id derived from coordinates and visit ("layer3", "layer3.1").
        coords: coordinate name -> value.
        inputs, outputs: the tensors that the chunk reads and makes.
        ports: port -> shape and dtype.
        code: the key of its functions in the store of code; equal for chunks that share code.
        random, draws: whether F draws random numbers, and by which operations, as its code numbers them.
        opaque: whether autograd runs it as it is, so that its inputs live on until its backward.
        keep: the policy of recomputation: which tensors F keeps for I and W. Chunks keep all; variants do not.
        experts: the axis whose devices each have some of its experts; it computes these for the rows of all of them.
        terms: (port, axes) for values that are partial sums on the devices along the axes; readers get the sum.
    """

    id: str
    coords: Mapping[str, int]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    ports: Mapping[str, TensorSpec]
    steps: Mapping[Step, Signature]
    code: str = ""
    random: bool = False
    opaque: bool = False
    keep: str = KEEP_ALL
    experts: str = ""
    terms: tuple[tuple[str, tuple[str, ...]], ...] = ()
    draws: tuple[Draw, ...] = ()

    @property
    def trades(self) -> str:
        """Return the axis along which its inputs and outputs are exchanged; "" if its steps exchange inside."""
        inside = {
            axis
            for sig in self.steps.values()
            for one in sig.collectives
            for axis in one.axis.split("+")
        }
        return "" if inside.issuperset(self.experts.split("+")) else self.experts

    @property
    def variant(self) -> str:
        """Return the name of the chunk under its policy, which is its id if all is kept."""
        return variant_name(self.id, self.keep)

    def cost_code(self, step: Step) -> str:
        """Return the code under which costs know a step: F, I and W take as long under any policy of recomputation."""
        if step in ("R", "B") or self.keep == KEEP_ALL:
            return self.code
        return self.code.partition(variant_name("", ""))[0]

    def bind(self, rows: int) -> Chunk:
        """Return the chunk at a number of rows."""
        return bind_chunks((self,), rows)[0]


def bind_chunks(chunks: Iterable[Chunk], rows: int) -> tuple[Chunk, ...]:
    """Return chunks at a number of rows; equal layers share their bound ports and steps."""
    ports, steps = dict[int, Mapping[str, TensorSpec]](), dict[int, Signature]()
    bound = []
    for chunk in chunks:
        inputs = tuple(Input(i.kind, i.ref, i.spec.bind(rows), i.needs_grad) for i in chunk.inputs)
        outputs = tuple(
            Output(o.kind, o.spec.bind(rows), o.ref, o.needs_grad, o.varies) for o in chunk.outputs
        )
        if id(chunk.ports) not in ports:
            ports[id(chunk.ports)] = {p: s.bind(rows) for p, s in chunk.ports.items()}
        for sig in chunk.steps.values():
            if id(sig) not in steps:
                steps[id(sig)] = sig.bind(rows)
        new = {s: steps[id(sig)] for s, sig in chunk.steps.items()}
        bound.append(
            replace(chunk, inputs=inputs, outputs=outputs, ports=ports[id(chunk.ports)], steps=new)
        )
    return tuple(bound)


@dataclass(frozen=True, slots=True)
class Param:
    """Describe a parameter.

    Attributes:
        name: its first name.
        tied: its other names.
        trained: False without requires_grad or a gradient path: it is in no bucket, has no state and is not updated.
        layout: how devices that share its chunks take it apart; its spec is that of one device's part.
        summed: the axes along which the gradients that devices make are terms of a sum.
    """

    name: str
    spec: TensorSpec
    tied: tuple[str, ...] = ()
    trained: bool = True
    layout: Layout = ()
    summed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Buffer:
    """Describe a buffer of the model; `persistent` as in torch."""

    name: str
    spec: TensorSpec
    persistent: bool = True


@dataclass(frozen=True, slots=True)
class BatchTensor:
    """Describe a tensor of the batch by its path in the return value of Job.batch ("inputs.0", "targets", ...).

    Attributes:
        counter: the code whose F counts this tensor in the tensors `counts` of a microbatch; "" for one that Job.batch
            returns. Its values are added up over all microbatches of the global batch before a step begins.
        counts: the names of these tensors.
    """

    name: str
    spec: TensorSpec
    counter: str = ""
    counts: tuple[str, ...] = ()


KEPT = 8
"""The number of different rows at which a program keeps its bound chunks."""


@dataclass(frozen=True)
class Program:
    """Hold a captured or synthetic model with its loss.

    Attributes:
        loss_kind: "mean" when the loss is a mean over the rows of the microbatch. "sum" when the last chunk has outputs
            of kind loss and weight, and the loss is sum(loss) / sum(weight) over the global batch. "total" when the
            losses of microbatches add up to that of the global batch.
        source: whether the program was captured or is synthetic.
        hop: seconds of latency of one hop between devices, in synthetic programs.
        overlap: seconds of an overlapped pair per stage, in synthetic programs.
        variants: chunks under policies of recomputation, for the policies that a strategy asks for.
        axes: the axes whose devices share the work of each chunk, with their sizes.
        experts: likewise the axes along which each device has some experts; their rows differ.
        layers: patterns of names of the modules that were asked for as layers, or LONGEST_CHAIN; none for the usual.
        constants: the entries of the batch that are no tensors, by path, as texts of Python.
        chained: whether most layers read the previous one's output. It and `variants` are no content: the key is equal.
    """

    chunks: tuple[Chunk, ...] = field(repr=False)
    params: tuple[Param, ...] = field(default=(), repr=False)
    buffers: tuple[Buffer, ...] = field(default=(), repr=False)
    batch: tuple[BatchTensor, ...] = field(default=(), repr=False)
    loss_kind: LossKind = "mean"
    source: Literal["captured", "synthetic"] = "captured"
    hop: float = 0.0
    overlap: tuple[float, ...] = ()
    variants: tuple[Chunk, ...] = field(default=(), repr=False)
    axes: tuple[tuple[str, int], ...] = ()
    experts: tuple[tuple[str, int], ...] = ()
    layers: tuple[str, ...] = ()
    chained: bool = True
    constants: tuple[tuple[str, str], ...] = ()
    _index: dict[str, Chunk] = field(init=False, repr=False, compare=False)
    _bound: dict[int, tuple[Chunk, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index", {c.variant: c for c in (*self.chunks, *self.variants)})
        object.__setattr__(self, "_bound", {})

    def chunk(self, id: str) -> Chunk:
        """Return the chunk with an id, or the variant of a chunk with that name."""
        return self._index[id]

    def has_variant(self, id: str, keep: str) -> bool:
        """Return whether a chunk is known under a policy."""
        return variant_name(id, keep) in self._index

    def bound(self, rows: int) -> tuple[Chunk, ...]:
        """Return the chunks at a number of rows; the results for the latest numbers are kept for searches."""
        if rows not in self._bound:
            if len(self._bound) >= KEPT:
                self._bound.pop(next(iter(self._bound)))
            self._bound[rows] = bind_chunks(self.chunks, rows)
        return self._bound[rows]

    def bound_variants(self, rows: int) -> tuple[Chunk, ...]:
        """Return the variants at a number of rows."""
        return bind_chunks(self.variants, rows)

    @cached_property
    def key(self) -> str:
        """Return the hash of the content; equal programs have equal keys on every machine."""
        return content_key(
            replace(self, variants=(), chained=True) if self.variants or not self.chained else self
        )
