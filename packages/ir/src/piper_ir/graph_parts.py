"""What a Graph is made of: values, nodes, and what directives say of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from piper_ir.ops import Op
from piper_ir.plan import Category
from piper_ir.sizes import TensorSpec

Coord = int | str


@dataclass(frozen=True, slots=True)
class GraphValue:
    """A value of the graph: its size (affine in rows) and the kind of memory that it will take."""

    spec: TensorSpec
    category: Category


@dataclass(frozen=True, slots=True)
class Node:
    """`coords`: region coordinates, `mb`, `phase` and `op`. `role` "" means not placed. For a Compute node, `reads` follows
    the value ports of the step in order (see `piper_compiler.ports`)."""

    id: str
    op: Op
    coords: Mapping[str, Coord]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    role: str = ""
    stream: str = "compute"

    @property
    def mb(self) -> int:
        """The microbatch, -1 for nodes of the whole step."""
        mb = self.coords.get("mb", -1)
        assert isinstance(mb, int)
        return mb


@dataclass(frozen=True, slots=True)
class Replication:
    """How the parameters of a chunk are replicated: mesh axes, bucket size in bytes of gradient, stream of the reductions (""
    = one of their own)."""

    over: tuple[str, ...]
    bucket_bytes: int
    stream: str
    applied: int


@dataclass(frozen=True, slots=True)
class Transport:
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
    """Compute of one device whose members may be interleaved: per member its node ids along the program. What an order puts
    before or after the group are order edges. `applied`: index in the log of the order that asked for it."""

    members: tuple[tuple[str, ...], ...]
    applied: int

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(id for member in self.members for id in member)
