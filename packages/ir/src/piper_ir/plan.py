"""Plan: what every executor consumes. Per role one total issue order; all sizes are ints.

A *role* is a set of ranks that run the same program on different data. Each instruction stands at one place of its role's
*program order*, on one stream; the order of a stream is the program order restricted to it. Streams run in order and beside
each other. An instruction starts when its predecessor on its stream is done and each of its waits is: a wait `(stream, n)` holds
until the first n instructions of that stream (of the same role) are done, and all n stand earlier in program order.

Memory is part of the plan. Only the stream "compute" allocates and frees, in program order: an instruction frees
`frees_before` (values whose last reader is a communication that it waits for), then runs its parts; each part allocates
its writes, runs and frees `frees`; then `allocs_after` (receive buffers) are made. A Recv waits for the instruction that made its
buffer and writes into it. Values written by a collective are allocated by `allocs_after` too.

Communication is by *channel*: one FIFO per directed pair of roles, or one set of roles, used by exactly one stream on each side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal, Protocol, TypeVar

from piper_ir.mesh import Mesh
from piper_ir.ops import COMM, Compute, Op, Update
from piper_ir.program import BatchTensor, Buffer, Chunk, Param
from piper_ir.sizes import TensorSpec, bind

V = TypeVar("V")
Co = TypeVar("Co", covariant=True)
PLAN_VERSION = 1
COMPUTE = "compute"
"""The one stream of a role that computes, allocates and frees."""

DeviceType = Literal["", "cpu", "cuda"]
"""Whose kernels the memory of a plan counts. "cuda": with what they hold inside; the others: tensors alone."""

Category = Literal["param", "grad", "optim", "buffer", "activation", "gradient", "batch", "scalar", "workspace"]
"""Owners of memory. States: param, grad (buckets), optim, buffer. Values: activation (outputs and saved tensors of F),
gradient (of activations), batch, scalar. workspace: what a running instruction holds beyond its values."""
CATEGORIES: tuple[Category, ...] = ("param", "grad", "optim", "buffer", "activation", "gradient", "batch", "scalar", "workspace")


@dataclass(frozen=True, slots=True)
class Value:
    """SSA: one writer, one role, born and freed within a step; owns its bytes."""

    id: str
    spec: TensorSpec
    category: Category

    @property
    def nbytes(self) -> int:
        return bind(self.spec.nbytes, 0)


class Values(Mapping[str, Value]):
    """Values by id, made when they are asked for: a plan has very many, and those of one port differ in their ids only. `kinds`:
    id -> (spec, category); it must not change any more."""

    __slots__ = ("_kinds",)

    def __init__(self, kinds: Mapping[str, tuple[TensorSpec, Category]]) -> None:
        self._kinds = kinds

    @property
    def kinds(self) -> Mapping[str, tuple[TensorSpec, Category]]:
        """What they are made of."""
        return self._kinds

    def __getitem__(self, id: str) -> Value:
        return Value(id, *self._kinds[id])

    def __contains__(self, id: object) -> bool:
        return id in self._kinds

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(frozen=True, slots=True)
class State:
    """Persistent bytes of a role: "param:BUCKET" (or "param:NAME" for what is not trained), "grad:BUCKET", "optim:BUCKET",
    "buffer:NAME"; never freed in a step."""

    id: str
    category: Category
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat gradient buffer, and the parameters whose gradients it holds, in order. Global: every holder has the same id,
    params and offsets (in elements, 256-byte aligned). `roles` hold it; `over` are the mesh axes along which it is replicated;
    `group` is the index of the optimizer's parameter group; `channel` reduces it ("" when one rank alone holds it)."""

    id: str
    params: tuple[str, ...]
    offsets: tuple[int, ...]
    numel: int
    dtype: str
    roles: tuple[str, ...]
    over: tuple[str, ...] = ()
    group: int = 0
    channel: str = ""


@dataclass(frozen=True, slots=True)
class Channel:
    """`kind` "p2p": roles = (source, destination), rank to rank where all unplaced axes agree. "group": all ranks of `roles`
    that agree on the axes that are neither placed nor in `over`. `streams`: the stream that uses it on each role of `roles`.
    `sms`: the SMs that communication on each of these streams takes from compute, where a strategy says so; 0: copy engines move
    it. Only simulations read it."""

    id: str
    kind: Literal["p2p", "group"]
    roles: tuple[str, ...]
    streams: tuple[str, ...]
    over: tuple[str, ...] = ()
    purpose: Literal["activation", "gradient", "reduce", "weight", "norm"] = "activation"
    sms: tuple[int | None, ...] = ()

    def stream_on(self, role: str) -> str:
        return self.streams[self.roles.index(role)]


@dataclass(frozen=True, slots=True)
class Part:
    """One op of an instruction. `mb` is the microbatch, -1 for ops of the whole step. `frees`: values that die when it is
    done."""

    node: str
    op: Op
    mb: int = -1
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Instr:
    """One entry of a role's program. Several parts only on the compute stream (B is I and W; `fuse` joins neighbours; an
    overlapped pair of a synthetic program is one instruction). `seconds`: the given duration of such a pair, which is not the
    sum of its parts."""

    stream: str
    parts: tuple[Part, ...]
    waits: tuple[tuple[str, int], ...] = ()
    frees_before: tuple[str, ...] = ()
    allocs_after: tuple[str, ...] = ()
    seconds: float | None = None

    @property
    def comm(self) -> bool:
        return isinstance(self.parts[0].op, COMM)

    @property
    def name(self) -> str:
        """The node of its first part, with the number of further parts: "layer3.B@2+1"."""
        more = len(self.parts) - 1
        return self.parts[0].node + (f"+{more}" if more else "")


@dataclass(frozen=True, slots=True)
class RolePlan:
    """`placed` fixes the role's mesh coordinates; ranks are all ranks there, ascending. `peak_bytes` is the most bytes in program
    order (states, values, workspace), reached in instruction `peak_at`; `peak_by_category` is the split at that moment."""

    role: str
    placed: Mapping[str, int]
    ranks: tuple[int, ...]
    program: Sequence[Instr]
    streams: tuple[str, ...]
    states: tuple[State, ...] = ()
    allocs_first: tuple[str, ...] = ()
    peak_bytes: int = 0
    peak_at: int = 0
    peak_by_category: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """`rows` is the row count of one microbatch on one rank; `replicas` the data-parallel width D (the product of the axes in
    `replicated`); global batch = rows * microbatches * D. `chunks` are bound to rows. `hop`: seconds of latency between
    devices, of synthetic programs. `tokens_per_row`: for tokens per second; None when unknown. `device`: the kind of device that
    peaks are for; a plan runs on any."""

    program_key: str
    mesh: Mesh
    rows: int
    microbatches: int
    replicated: tuple[str, ...]
    roles: tuple[RolePlan, ...]
    channels: tuple[Channel, ...]
    buckets: tuple[Bucket, ...]
    values: Mapping[str, Value]
    chunks: tuple[Chunk, ...]
    params: tuple[Param, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    batch: tuple[BatchTensor, ...] = ()
    loss_kind: Literal["mean", "sum"] = "mean"
    hop: float = 0.0
    recv_ahead: int = 2
    tokens_per_row: int | None = None
    device: DeviceType = ""
    version: int = PLAN_VERSION
    _chunks: dict[str, Chunk] = field(init=False, repr=False, compare=False)
    _roles: dict[str, RolePlan] = field(init=False, repr=False, compare=False)
    _channels: dict[str, Channel] = field(init=False, repr=False, compare=False)
    _buckets: dict[str, Bucket] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_chunks", {c.id: c for c in self.chunks})
        object.__setattr__(self, "_roles", {r.role: r for r in self.roles})
        object.__setattr__(self, "_channels", {c.id: c for c in self.channels})
        object.__setattr__(self, "_buckets", {b.id: b for b in self.buckets})

    def chunk(self, id: str) -> Chunk:
        return self._chunks[id]

    def role(self, id: str) -> RolePlan:
        return self._roles[id]

    def channel(self, id: str) -> Channel:
        return self._channels[id]

    def bucket(self, id: str) -> Bucket:
        return self._buckets[id]

    @cached_property
    def kinds(self) -> Mapping[str, tuple[TensorSpec, Category]]:
        """Of each value its spec and category, for who asks for very many and needs no Value."""
        values = self.values
        return values.kinds if isinstance(values, Values) else {id: (v.spec, v.category) for id, v in values.items()}

    @property
    def replicas(self) -> int:
        return prod(self.mesh.size(axis) for axis in self.replicated)

    @property
    def global_batch(self) -> int:
        return self.rows * self.microbatches * self.replicas

    @property
    def tokens_per_step(self) -> int | None:
        return None if self.tokens_per_row is None else self.tokens_per_row * self.global_batch

    @cached_property
    def _role_at(self) -> dict[int, RolePlan]:
        """Rank -> its role; of a plan that is not valid, the first that has it."""
        return {rank: role for role in reversed(self.roles) for rank in role.ranks}

    def role_of(self, rank: int) -> RolePlan:
        """The role that a rank runs; KeyError for a rank outside of the mesh."""
        found = self._role_at.get(rank)
        if found is None:
            raise KeyError(f"rank {rank} is in no role; the mesh has {self.mesh.world} ranks")
        return found

    def replica_of(self, rank: int) -> int:
        """The data-parallel index of a rank in 0..D-1: rows [i*G/D, (i+1)*G/D) of the global batch are its own."""
        coords, index, stride = self.mesh.coords(rank), 0, 1
        for axis in self.mesh.axes:
            if axis in self.replicated:
                index += coords[axis] * stride
                stride *= self.mesh.size(axis)
        return index

    def peers(self, channel: Channel, rank: int) -> tuple[int, ...]:
        """The ranks of `rank`'s instance of a channel, ascending; for p2p (source, destination)."""
        here = self.mesh.coords(rank)
        free = {a: here[a] for a in self.mesh.axes if a not in channel.over and a not in self.role_of(rank).placed}
        if channel.kind == "p2p":
            source, destination = (self.mesh.rank({**here, **self.role(r).placed}) for r in channel.roles)
            return source, destination
        members = {r for role in channel.roles for r in self.mesh.ranks({**free, **self.role(role).placed})}
        return tuple(sorted(members))

    def instructions(self) -> Iterator[tuple[RolePlan, int, Instr]]:
        """Every instruction with its role and its index in the role's program."""
        for role in self.roles:
            for index, instr in enumerate(role.program):
                yield role, index, instr

    @cached_property
    def key(self) -> str:
        """Content hash: equal plans have equal keys, on every machine."""
        import hashlib

        from piper_ir.codec import dumps

        return hashlib.sha256(dumps(self).encode()).hexdigest()[:16]


class PartLike(Protocol[Co]):
    """What memory asks of a part, whose values may be names or numbers."""

    @property
    def op(self) -> Op: ...
    @property
    def reads(self) -> tuple[Co, ...]: ...
    @property
    def writes(self) -> tuple[Co, ...]: ...
    @property
    def frees(self) -> tuple[Co, ...]: ...


def part_peak(plan: Plan, part: PartLike[V], nbytes: Mapping[V, int]) -> int:
    """Most bytes that a part holds while it runs, above those alive before it: its writes and temporaries, less what its dying
    inputs give back early (hence it can be below the bytes of its writes). `nbytes`: bytes of each value."""
    writes = sum(nbytes[v] for v in part.writes)
    if not isinstance(part.op, Compute):
        return writes + (part.op.workspace if isinstance(part.op, Update) else 0)
    chunk = plan.chunk(part.op.chunk)
    assert part.op.step != "B", "a plan holds I and W parts; B exists in graphs only"
    sig = chunk.steps[part.op.step]
    if not sig.liveness.consumed and sig.liveness.segments == ((),):  # nothing known (synthetic): no temporaries
        return writes
    ports = value_ports(chunk, part)
    dying = {
        v: i
        for i, v in sorted(
            ports.items(), key=lambda p: sig.liveness.consumed.index(p[0]) if p[0] in sig.liveness.consumed else -1
        )
    }
    return sig.liveness.peak({dying[v]: nbytes[v] for v in part.frees if v in dying}, plan.device)


def value_ports(chunk: Chunk, part: PartLike[V]) -> dict[int, V]:
    """Index into the signature's reads -> value id. A part lists its values in the order of the signature's ports, without
    the ports that are parameters or buffers."""
    assert isinstance(part.op, Compute) and part.op.step != "B"
    values = iter(part.reads)
    return {i: next(values) for i, port in enumerate(chunk.steps[part.op.step].reads) if not is_state(chunk, port)}


def is_state(chunk: Chunk, port: str) -> bool:
    """Whether a port of the chunk is a parameter or buffer (a State) and not a Value."""
    return port.startswith("in") and chunk.inputs[int(port[2:])].kind in ("param", "buffer")
