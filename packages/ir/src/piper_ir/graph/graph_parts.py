"""Define the elements of a Graph: values, nodes, and the records that directives add."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from piper_ir.ground.node_ids import named
from piper_ir.ground.shards import UNSHARDED, Shards
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import Category
from piper_ir.program.ops import Op

Coord = int | str


Mbs = range | tuple[int, ...]
"""The type of ascending microbatches: a range if they are evenly spaced."""

At = tuple[str, int]
"""The id of a node or value, and one of its microbatches; -1 for nodes and values of the whole step."""


def mbs_of(numbers: Iterable[int]) -> Mbs:
    """Return microbatches in their normal form, so that equal ones compare equal."""
    if isinstance(numbers, range) and numbers.step > 0:
        return numbers
    ordered = sorted(set(numbers))
    if len(ordered) < 2:
        return range(ordered[0], ordered[0] + 1) if ordered else range(0)
    evenly = range(ordered[0], ordered[-1] + 1, ordered[1] - ordered[0])
    return evenly if len(evenly) == len(ordered) and ordered == list(evenly) else tuple(ordered)


def common(a: Mbs | None, b: Mbs | None) -> Mbs | None:
    """Return the microbatches that two nodes share; None when one node belongs to the whole step."""
    if a is None or b is None:
        return None
    if a is b or a == b:
        return a
    if isinstance(a, range) and isinstance(b, range) and a.step == b.step == 1:
        return range(max(a.start, b.start), max(a.start, b.start, min(a.stop, b.stop)))
    few, many = (a, b) if len(a) < len(b) else (b, a)
    known = many if isinstance(many, range) else frozenset(many)
    return mbs_of([mb for mb in few if mb in known])


def without(a: Mbs, b: Mbs) -> Mbs:
    """Return the microbatches of a that are not in b."""
    known = b if isinstance(b, range) else frozenset(b)
    return mbs_of([mb for mb in a if mb not in known])


@dataclass(frozen=True, slots=True)
class GraphValue:
    """Describe a value of the graph.

    Attributes:
        spec: its size, affine in rows.
        category: the kind of memory that it will take.
        tail: see `named`; for a copy on another role "#" and the role.
    """

    spec: TensorSpec
    category: Category
    tail: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """Hold one op with its reads, writes, role and stream; it runs in each of the microbatches `mbs`.

    Attributes:
        id: its name without a microbatch.
        coords: region coordinates, `phase` and `op`.
        reads: values of the same microbatch; a node of the whole step reads a value in all microbatches in which its
            role has it. For a Compute node they follow the value ports of the step in order (`ports.py` of the
            compiler).
        writes: values of the same microbatch.
        role: where it runs; "" means not placed.
        mbs: its microbatches; None: once in the step, or the batch is not split.
        tail: see `named`.
        made: a number that grows with each new node; the nodes of a graph stand in this order.
    """

    id: str
    op: Op
    coords: Mapping[str, Coord]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    role: str = ""
    stream: str = "compute"
    mbs: Mbs | None = field(
        default=None, metadata={"json": False}
    )  # written by `piper_ir.graph.graph_json`
    tail: str = ""
    made: int = field(default=-1, compare=False, metadata={"json": False})

    @property
    def mb(self) -> int:
        """Return the microbatch of a node that stands for one, -1 for nodes of the whole step."""
        if self.mbs is not None:
            (single,) = self.mbs
            return single
        mb = self.coords.get("mb", -1)
        assert isinstance(mb, int)
        return mb

    @property
    def each(self) -> Mbs:
        """Return the microbatches one by one; -1 for the whole step."""
        return (-1,) if self.mbs is None else self.mbs

    def name(self, mb: int) -> str:
        """Return the node's name in one of its microbatches."""
        return named(self.id, self.tail, mb)

    def like(self, other: Node) -> bool:
        """Return whether the two differ in their microbatches only."""
        return (
            self.made == other.made
            and (self.role, self.stream, self.reads, self.writes)
            == (other.role, other.stream, other.reads, other.writes)
            and self.op == other.op
            and self.coords == other.coords
        )


def in_mbs(node: Node, mbs: Mbs | None) -> Node:
    """Return the node restricted to some of its microbatches."""
    return node if mbs is node.mbs else with_mbs(node, mbs, node.made)


def with_mbs(node: Node, mbs: Mbs | None, made: int) -> Node:
    """Return the node with other microbatches and another number; large plans make many, and `replace` is slow."""
    return Node(
        node.id,
        node.op,
        node.coords,
        node.reads,
        node.writes,
        node.role,
        node.stream,
        mbs,
        node.tail,
        made,
    )


def joined_nodes(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return the nodes of a family, with nodes that differ only in their microbatches joined."""
    joined: list[Node] = []
    for node in nodes:
        for k, other in enumerate(joined):
            if node.mbs is not None and other.mbs is not None and node.like(other):
                joined[k] = in_mbs(other, mbs_of((*other.mbs, *node.mbs)))
                break
        else:
            joined.append(node)
    return tuple(joined)


def on_role(node: Node, role: str) -> Node:
    """Return the node placed on a role."""
    return Node(
        node.id,
        node.op,
        node.coords,
        node.reads,
        node.writes,
        role,
        node.stream,
        node.mbs,
        node.tail,
        node.made,
    )


@dataclass(frozen=True, slots=True)
class Replication:
    """Say how the parameters of a chunk are replicated.

    Attributes:
        over: mesh axes.
        bucket_bytes: size of a bucket in bytes of gradient.
        stream: the stream of the reductions; "" means one of their own.
        applied: index in the log of the directive.
        shard: the axes along which ranks share states.
        gather: the stream of gathers; "" means one of their own.
        resident_bytes: the most bytes of gathered parameters that a role keeps for later uses; None: all, for the step.
        reduced_bytes: likewise of gradients that are not scattered yet.
        prefetch: how many uses of gathered parameters ahead a gather is issued.
        whole_bytes: the most bytes of a parameter that is not sharded where others are.
        overlap: whether gathers and reductions run beside compute.
    """

    over: tuple[str, ...]
    bucket_bytes: int
    stream: str
    applied: int
    shard: Shards = UNSHARDED
    gather: str = ""
    resident_bytes: int | None = 0
    reduced_bytes: int | None = 0
    prefetch: int = 1
    whole_bytes: int = 0
    overlap: bool = True

    @property
    def together(self) -> tuple[object, ...]:
        """Return the settings that chunks with a shared parameter must agree on."""
        return (
            self.over,
            self.bucket_bytes,
            self.stream,
            self.shard,
            self.gather,
            self.whole_bytes,
            self.overlap,
        )


@dataclass(frozen=True, slots=True)
class Offloading:
    """Say which tensors of a chunk wait for its backward in the memory of the host.

    Attributes:
        tensors: "saved" (by its forward for its backward), "inputs" (activations that chunks hand on and its backward
            reads again), or "all" of these.
        least_bytes: smaller tensors stay.
        prefetch: how many backwards of such chunks ahead of its first reader a tensor is brought back.
        told_by: the policy of recomputation that would make the tensors again; "" for all.
    """

    tensors: str
    least_bytes: int
    prefetch: int
    told_by: str = ""


@dataclass(frozen=True, slots=True)
class EdgeExchange:
    """Say how the devices along an axis exchange values between chunks: on which stream, and with how many SMs."""

    stream: str
    sms: int | None = None


@dataclass(frozen=True, slots=True)
class TransferStreams:
    """Name the streams for point-to-point messages, chosen where a node was placed; "" means a stream per channel."""

    send: str
    recv: str


@dataclass(frozen=True, slots=True)
class Applied:
    """Name one directive of the strategy, as text, and where the user wrote it ("file.py:12")."""

    text: str
    site: str

    def __str__(self) -> str:
        return f"{self.text} ({self.site})" if self.site else self.text


@dataclass(frozen=True, slots=True)
class OrderEnd:
    """Name one end of a `MessageOrder`: a node, or with `chunks` the messages of the buckets of their parameters.

    Attributes:
        id: the id of the node; "gather" or "reduce" for messages.
        mb: the microbatch of the node; -1 for messages.
        chunks: the chunks; empty for a node.
    """

    id: str
    mb: int = -1
    chunks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MessageOrder:
    """Record that one end comes before another on a role, where an end names messages that are made later.

    Attributes:
        role: the role; "" if nothing is placed.
        before: the end that comes first.
        after: the end that waits for it.
        applied: index in the log of the order that asked for it.
    """

    role: str
    before: OrderEnd
    after: OrderEnd
    applied: int


@dataclass(frozen=True, slots=True)
class OverlapGroup:
    """Hold compute of one device whose members may be interleaved.

    Order edges lead to and from everything that an order puts before and after the group.

    Attributes:
        members: for each member its nodes along the program, each in one microbatch.
        applied: index in the log of the order that asked for it.
    """

    members: tuple[tuple[At, ...], ...]
    applied: int

    @property
    def nodes(self) -> tuple[At, ...]:
        """Return the nodes of all members."""
        return tuple(at for member in self.members for at in member)
