"""Define the Plan, which every executor consumes: one total issue order per role, with sizes that are all ints.

A *role* is a set of ranks that run the same program on different data. Each instruction stands at one position in its
role's *program order*, on one stream; the order of a stream is the program order restricted to it. Streams run in order
and beside each other. An instruction starts when its predecessor on its stream is done and each of its waits is: a wait
`(stream, n)` holds until the first n instructions of that stream (of the same role) are done, and all n stand earlier
in program order.

Memory is part of the plan. Only the stream "compute" allocates and frees, in program order. An instruction frees
`frees_before` (values whose last reader is a communication that it waits for), then runs its parts. Each part allocates
its writes, runs, and frees `frees`. Then `allocs_after` (receive buffers) are allocated. A Recv waits for the
instruction that allocated its buffer and writes into it. Values written by a collective are allocated by `allocs_after`
too.

Communication is by *channel*: one FIFO per directed pair of roles, or one set of roles, used by exactly one stream on
each side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, cast

from piper_ir.ground.content import content_key
from piper_ir.ground.errors import PlanError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.sizes import TensorSpec, bind
from piper_ir.plan.instr_table import InstrTable, Kinds
from piper_ir.plan.instructions import CATEGORIES as CATEGORIES
from piper_ir.plan.instructions import COMPUTE as COMPUTE
from piper_ir.plan.instructions import HOST as HOST
from piper_ir.plan.instructions import Category as Category
from piper_ir.plan.instructions import Instr as Instr
from piper_ir.plan.instructions import Part as Part
from piper_ir.plan.plan_groups import Bucket as Bucket
from piper_ir.plan.plan_groups import Channel as Channel
from piper_ir.plan.table_kinds import TableKinds, tabulate
from piper_ir.program.layout import Layout, whole_shape
from piper_ir.program.program import BatchTensor, Buffer, Chunk, LossKind, Param
from piper_ir.tools import Brief, count_text, size_text

PLAN_VERSION = 1

DeviceType = Literal["", "cpu", "cuda"]
"""The kind of device whose memory a plan counts: "cuda" with the workspace of kernels, the others tensors alone."""


@dataclass(frozen=True, slots=True)
class Value:
    """Describe a value: it has one writer and one role, is born and freed within a step, and owns its bytes."""

    id: str
    spec: TensorSpec
    category: Category

    @property
    def nbytes(self) -> int:
        """Return the bytes of the value."""
        return bind(self.spec.nbytes, 0)


class Values(Mapping[str, Value]):
    """Map ids to values that are made when they are asked for.

    A plan has very many values, and the values of one port differ in their ids only. `kinds` maps ids to (spec,
    category) and must not change any more.
    """

    __slots__ = ("_kinds",)

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds

    @staticmethod
    def of(values: Mapping[str, Value]) -> Values:
        """Return values that are given one by one."""
        return Values({id: (v.spec, v.category) for id, v in values.items()})

    @property
    def kinds(self) -> Kinds:
        """Return the spec and category of each id."""
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
    """Describe persistent bytes of a role, which no step frees.

    Attributes:
        category: param, grad, optim or buffer.
        name: the bucket that it belongs to, or the parameter or buffer that is in none.
        nbytes: its bytes on one rank.
        flat: whether `name` is that of a bucket, so that it holds one flat tensor for all of its parameters.
        host: whether it is in the memory of the host.
    """

    category: Category
    name: str
    nbytes: int
    flat: bool = False
    host: bool = False

    @property
    def id(self) -> str:
        """Return its name in messages, which is unique on a role: "param:bucket0" or "buffer:scale"."""
        return f"{self.category}:{self.name}"


@dataclass(frozen=True, slots=True)
class RolePlan:
    """Describe the program and the memory of the ranks of one role.

    Attributes:
        placed: the mesh coordinates that the role fixes.
        ranks: all ranks at these coordinates, ascending.
        program: the instructions in program order. A plan keeps them as a table, see `table`.
        streams: the streams of these instructions.
        states: the persistent bytes of the role.
        allocs_first: values whose memory is allocated before the first instruction.
        peak_bytes: the most bytes held in program order: states, values and workspace.
        peak_at: the instruction at which the peak is reached.
        peak_by_category: the bytes of that moment by category.
        host_peak_bytes: the most bytes of states, values and copies of gradients in the memory of the host, in program
            order.
    """

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
    host_peak_bytes: int = 0

    @property
    def device_states(self) -> tuple[State, ...]:
        """Return the states in the memory of the device."""
        return tuple([s for s in self.states if not s.host])

    @property
    def table(self) -> InstrTable:
        """Return the program of a role of a plan; `Plan` makes tables of programs that are given as instructions."""
        return cast(InstrTable, self.program)


@dataclass(frozen=True, repr=False)
class Plan(Brief):
    """Hold everything that executors need to run or simulate one training step, or one batch of an evaluation.

    Attributes:
        rows: rows of one microbatch on one rank; the global batch has rows * microbatches * `replicas` rows.
        replicated: the axes of data parallelism.
        chunks: the chunks of the program, bound to `rows`.
        loss_kind: as in `Program`.
        hop: seconds of latency between devices, in synthetic programs.
        recv_ahead: how many compute instructions before its first reader a receive was placed.
        tokens_per_row: tokens in a row, for tokens per second; None when unknown.
        device: the kind of device that peaks are for; a plan runs on any.
        version: the version of the file format.
        variants: the chunks under the policies of recomputation that parts name, likewise bound.
        shared: the axes whose devices share the work of each chunk.
        experts: the axes along which each device has some experts.
        constants: as in `Program`.
        evaluates: whether it is an evaluation's: forwards alone, which change no parameter.
        cuda_graph: whether a rank's instructions up to its update are one CUDA graph, captured once and replayed.
    """

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
    loss_kind: LossKind = "mean"
    hop: float = 0.0
    recv_ahead: int = 2
    tokens_per_row: int | None = None
    device: DeviceType = ""
    version: int = PLAN_VERSION
    variants: tuple[Chunk, ...] = ()
    shared: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    constants: tuple[tuple[str, str], ...] = ()
    evaluates: bool = False
    cuda_graph: bool = False
    _kinds: TableKinds = field(init=False, repr=False, compare=False)
    _chunks: dict[str, Chunk] = field(init=False, repr=False, compare=False)
    _roles: dict[str, RolePlan] = field(init=False, repr=False, compare=False)
    _channels: dict[str, Channel] = field(init=False, repr=False, compare=False)
    _buckets: dict[str, Bucket] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._tabulate()
        object.__setattr__(self, "_chunks", {c.variant: c for c in (*self.chunks, *self.variants)})
        object.__setattr__(self, "_roles", {r.role: r for r in self.roles})
        object.__setattr__(self, "_channels", {c.id: c for c in self.channels})
        object.__setattr__(self, "_buckets", {b.id: b for b in self.buckets})

    def _tabulate(self) -> None:
        """Make tables of programs that are given as instructions, or that the plan's values are not those of."""
        values = self.values
        plan_values = values if isinstance(values, Values) else Values.of(values)
        programs = [(role.program, role.allocs_first) for role in self.roles]
        kinds = tabulate(programs, plan_values.kinds)
        if kinds is not plan_values.kinds:
            tables = zip(self.roles, kinds.programs, strict=True)
            roles = tuple([replace(role, program=table) for role, table in tables])
            object.__setattr__(self, "roles", roles)
            object.__setattr__(self, "values", Values(kinds))
        object.__setattr__(self, "_kinds", kinds)

    @property
    def codes(self) -> tuple[str, ...]:
        """Return the ids of all code that ranks run: the code of chunks, and the code that counts in a batch."""
        return (
            *(c.code for c in (*self.chunks, *self.variants)),
            *(b.counter for b in self.batch if b.counter),
        )

    def facts(self) -> Iterator[tuple[str, object]]:
        """Yield the mesh, the size of the plan, and the peak of its fullest role."""
        yield "mesh", self.mesh
        yield "microbatches", f"{self.microbatches} of {count_text(self.rows, 'row')}"
        yield "roles", len(self.roles)
        yield "instructions", sum(len(role.program) for role in self.roles)
        yield "peak", size_text(max((role.peak_bytes for role in self.roles), default=0))

    def chunk(self, id: str) -> Chunk:
        """Return the chunk with an id, or the variant of a chunk with that name (`Compute.variant`)."""
        return self._chunks[id]

    def role(self, id: str) -> RolePlan:
        """Return the role with a name."""
        return self._roles[id]

    def channel(self, id: str) -> Channel:
        """Return the channel with an id."""
        return self._channels[id]

    def bucket(self, id: str) -> Bucket:
        """Return the bucket with an id."""
        return self._buckets[id]

    @property
    def kinds(self) -> TableKinds:
        """Return the spec and category of every value by id, which is cheaper than to build `Value` objects."""
        return self._kinds

    @property
    def replicas(self) -> int:
        """Return the data-parallel width: the product of the sizes of the axes in `replicated`."""
        return self.mesh.degree(self.replicated)

    @cached_property
    def whole_params(self) -> tuple[Param, ...]:
        """Return the parameters with the specs that they have over all devices, as the model makes them."""
        degrees = dict(self.mesh.sizes)
        return tuple(
            replace(p, spec=TensorSpec(whole_shape(p.spec.shape, p.layout, degrees), p.spec.dtype))
            if p.layout
            else p
            for p in self.params
        )

    @cached_property
    def whole_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes that parameters have over all devices."""
        return {p.name: tuple(bind(d, 0) for d in p.spec.shape) for p in self.whole_params}

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """Return how the parameters are taken apart."""
        return {p.name: p.layout for p in self.params}

    @property
    def global_batch(self) -> int:
        """Return the rows of one step on all ranks."""
        return self.rows * self.microbatches * self.replicas

    @property
    def tokens_per_step(self) -> int | None:
        """Return the tokens of one step on all ranks; None when they are not known."""
        return None if self.tokens_per_row is None else self.tokens_per_row * self.global_batch

    @cached_property
    def _role_at(self) -> dict[int, RolePlan]:
        """Return the role of each rank; in a plan that is not valid, the first of several."""
        return {rank: role for role in reversed(self.roles) for rank in role.ranks}

    def role_of(self, rank: int) -> RolePlan:
        """Return the role that a rank runs; raise KeyError for a rank outside of the mesh."""
        role = self._role_at.get(rank)
        if role is None:
            raise KeyError(f"rank {rank} is in no role; the mesh has {self.mesh.world} ranks")
        return role

    def replica_of(self, rank: int) -> int:
        """Return the data-parallel index i of a rank, from 0 to D - 1, where D is `replicas`.

        Its rows of the global batch of G rows are [i*G/D, (i+1)*G/D).
        """
        return self.mesh.index_along(self.replicated, rank)

    def peers(self, channel: Channel, rank: int) -> tuple[int, ...]:
        """Return the ranks of `rank`'s instance of a channel, ascending; (source, destination) for p2p."""
        coords = self.mesh.coords(rank)
        free = {
            a: coords[a]
            for a in self.mesh.axes
            if a not in channel.over and a not in self.role_of(rank).placed
        }
        if channel.kind == "p2p":
            source, destination = (
                self.mesh.rank({**coords, **self.role(r).placed}) for r in channel.roles
            )
            return source, destination
        members = {
            r for role in channel.roles for r in self.mesh.ranks({**free, **self.role(role).placed})
        }
        return tuple(sorted(members))

    def instructions(self) -> Iterator[tuple[RolePlan, int, Instr]]:
        """Yield every instruction with its role and its index in the role's program."""
        for role in self.roles:
            for index, instr in enumerate(role.program):
                yield role, index, instr

    @cached_property
    def key(self) -> str:
        """Return the hash of the content; equal plans have equal keys on every machine."""
        return content_key(self)


def inside_channel(axis: str, role: str) -> str:
    """Return the id of the channel on which the devices along an axis meet inside of the steps of a role."""
    return f"{axis}.{role}"


def is_state(chunk: Chunk, port: str) -> bool:
    """Return whether a port of the chunk is a parameter or buffer (a State) and not a Value."""
    return port.startswith("in") and chunk.inputs[int(port[2:])].kind in ("param", "buffer")


def check_plan(call: str, plan: object) -> None:
    """Raise PlanError, in the name of a `call`, for an argument that is no plan."""
    if not isinstance(plan, Plan):
        raise PlanError(
            f"{call}: a {type(plan).__name__} stands here; the plan of piper.compile(...).plan is needed"
        )
