"""What a Graph is made of: values, nodes, and what directives say of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from piper_ir.ops import Op
from piper_ir.plan import Category
from piper_ir.sizes import TensorSpec

Coord = int | str


Mbs = range | tuple[int, ...]
"""Microbatches, ascending: a range where they are evenly spaced."""

At = tuple[str, int]
"""The id of a node or value, and one of its microbatches; -1 for what belongs to the whole step."""


def mbs_of(numbers: Iterable[int]) -> Mbs:
    """Return microbatches in their one form, so that equal ones compare equal."""
    if isinstance(numbers, range) and numbers.step > 0:
        return numbers
    found = sorted(set(numbers))
    if len(found) < 2:
        return range(found[0], found[0] + 1) if found else range(0)
    evenly = range(found[0], found[-1] + 1, found[1] - found[0])
    return evenly if len(evenly) == len(found) and found == list(evenly) else tuple(found)


def common(a: Mbs | None, b: Mbs | None) -> Mbs | None:
    """Return what two nodes share: None when one of them belongs to the whole step, empty when they share nothing."""
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


def named(id: str, tail: str, mb: int) -> str:
    """Return the name of a node or value in one microbatch: "layer0.F@2". `tail`: the end of the id that stays its end."""
    if mb < 0:
        return id
    return f"{id[: len(id) - len(tail)]}@{mb}{tail}" if tail else f"{id}@{mb}"


def compute_id(chunk: str, step: str) -> str:
    """Return the id of the node that computes a step of a chunk."""
    return f"{chunk}.{step}"


def send_id(copy: str) -> str:
    """Return the id of the node that sends what arrives as `copy`."""
    return f"send.{copy}"


@dataclass(frozen=True, slots=True)
class GraphValue:
    """A value of the graph: its size (affine in rows) and the kind of memory that it will take. `tail`: see `named`; of a copy
    on another role "#" and the role."""

    spec: TensorSpec
    category: Category
    tail: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """What is done in each of the microbatches `mbs`; None: once in the step, or the batch is not split. `reads` and `writes` are
    values of the same microbatch; a node of the whole step reads a value in all microbatches in which its role has it.
    `coords`: region coordinates, `phase` and `op`. `role` "" means not placed. For a Compute node, `reads` follows
    the value ports of the step in order (see `piper_compiler.ports`). `tail`: see `named`. `made`: when it was made, by which
    the nodes of a graph stand."""

    id: str
    op: Op
    coords: Mapping[str, Coord]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    role: str = ""
    stream: str = "compute"
    mbs: Mbs | None = field(default=None, metadata={"json": False})  # written by `piper_ir.graph_json`
    tail: str = ""
    made: int = field(default=-1, compare=False, metadata={"json": False})

    @property
    def mb(self) -> int:
        """The microbatch of a node that stands for one, -1 for nodes of the whole step."""
        if self.mbs is not None:
            (single,) = self.mbs
            return single
        mb = self.coords.get("mb", -1)
        assert isinstance(mb, int)
        return mb

    @property
    def each(self) -> Mbs:
        """The microbatches one by one; -1 for the whole step."""
        return (-1,) if self.mbs is None else self.mbs

    def name(self, mb: int) -> str:
        """What the node is called in one of its microbatches."""
        return named(self.id, self.tail, mb)

    def like(self, other: Node) -> bool:
        """Whether the two differ in their microbatches only."""
        return (
            self.made == other.made
            and (self.role, self.stream, self.reads, self.writes) == (other.role, other.stream, other.reads, other.writes)
            and self.op == other.op
            and self.coords == other.coords
        )


def in_mbs(node: Node, mbs: Mbs | None) -> Node:
    """Return the node in these of its microbatches."""
    if mbs is node.mbs:
        return node
    return Node(node.id, node.op, node.coords, node.reads, node.writes, node.role, node.stream, mbs, node.tail, node.made)


def on_role(node: Node, role: str) -> Node:
    """Return the node placed on a role."""
    return Node(node.id, node.op, node.coords, node.reads, node.writes, role, node.stream, node.mbs, node.tail, node.made)


@dataclass(frozen=True, slots=True)
class Replication:
    """How the parameters of a chunk are replicated: mesh axes, bucket size in bytes of gradient, stream of the reductions (""
    = one of their own)."""

    over: tuple[str, ...]
    bucket_bytes: int
    stream: str
    applied: int


@dataclass(frozen=True, slots=True)
class TransferStreams:
    """Streams for point-to-point, chosen where a node was placed; "" = a stream per channel."""

    send: str
    recv: str


@dataclass(frozen=True, slots=True)
class Applied:
    """One directive of the strategy, as text, and where the user wrote it ("file.py:12")."""

    text: str
    site: str

    def __str__(self) -> str:
        return f"{self.text} ({self.site})" if self.site else self.text


@dataclass(frozen=True, slots=True)
class OverlapGroup:
    """Compute of one device whose members may be interleaved: per member its nodes along the program, each in one microbatch.
    What an order puts before or after the group are order edges. `applied`: index in the log of the order that asked for it."""

    members: tuple[tuple[At, ...], ...]
    applied: int

    @property
    def nodes(self) -> tuple[At, ...]:
        """The nodes of all members."""
        return tuple(at for member in self.members for at in member)
