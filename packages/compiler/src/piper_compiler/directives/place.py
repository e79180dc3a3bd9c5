"""Define `place`: run nodes on mesh coordinates, with point-to-point communication on the edges that cross.

    before  layer1.F@0 -> layer2.F@0
    after   layer1.F@0 on pp0 -> send on pp0, recv on pp1 -> layer2.F@0 on pp1      place(where(stage=1), on=dict(pp=1))

Legality
 1. `on` names axes of the mesh, with coordinates inside of it. (An axis of degree 1 is not an error.)
 2. No selected node is placed already.
 3. All placements of a strategy fix the same axes, so that two roles are equal or disjoint.
 4. Placed axes are not axes over which the nodes are replicated.
 5. The streams named for a role agree with those named by earlier placements on it, and differ from the compute stream.
 6. The backward of a chunk and microbatch runs on the ranks of its forward: its saved tensors are there.
 7. Devices do not share chunks or experts along the axes (by `shard`): those run one program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from piper_compiler.directives.base import (
    call_site,
    compute_nodes,
    directive,
    fail,
    names,
    site_field,
)
from piper_compiler.directives.decided import Decided
from piper_compiler.directives.shard import shared_axes
from piper_ir.graph.graph import Editor, Graph, Node, TransferStreams
from piper_ir.graph.graph_parts import common, in_mbs, on_role
from piper_ir.ground.mesh import AXES
from piper_ir.ground.select import Where
from piper_ir.plan.plan import COMPUTE


@directive
@dataclass(frozen=True, init=False)
class Place:
    """Run nodes on all ranks that have the coordinates `on`.

    Attributes:
        on: (axis, coordinate) pairs.
        send: name of the stream for the sends of these nodes (default: a stream for each channel).
        recv: name of the stream for their receives (default: a stream for each channel).
        site: where the user wrote it.
    """

    selection: Where
    on: tuple[tuple[str, int], ...]
    send: str = ""
    recv: str = ""
    site: str = site_field()

    def __init__(
        self,
        selection: Where,
        on: Mapping[str, int] | tuple[tuple[str, int], ...],
        send: str = "",
        recv: str = "",
        site: str | None = None,
    ) -> None:
        object.__setattr__(self, "selection", selection)
        pairs = tuple(on.items()) if isinstance(on, Mapping) else on
        object.__setattr__(
            self, "on", tuple(sorted(pairs, key=str)) if isinstance(pairs, tuple) else pairs
        )
        object.__setattr__(self, "send", send)
        object.__setattr__(self, "recv", recv)
        object.__setattr__(self, "site", call_site() if site is None else site)

    def check(self, graph: Graph) -> None:
        self._check_axes(graph)
        nodes = compute_nodes(self, graph, self.selection)
        placed = [n for n in nodes if n.role]
        if placed:
            raise fail(
                self,
                2,
                f"{names(graph, placed)} is placed on {placed[0].role} already; a node runs in one place",
            )
        fixed = dict(self.on)
        for role, other in graph.roles.items():
            if set(other) != set(fixed):
                message = f"it fixes {sorted(fixed)} but {role} fixes {sorted(other)}; give every placement the same axes"
                raise fail(self, 3, message)
        for node in nodes:
            over = graph.replication.get(str(node.coords["chunk"]))
            if over is not None and set(over.over) & set(fixed):
                raise fail(
                    self,
                    4,
                    f"{node.name(node.each[0])} is replicated over {over.over}; a placed axis "
                    f"cannot be replicated too",
                )
        self._check_streams(graph, role_name(fixed))
        for node in nodes:
            for twin in _other_phases(graph, node):
                if twin.role not in ("", role_name(fixed)):
                    name = twin.name(twin.each[0])
                    message = (
                        f"{name} is placed on {twin.role}; both phases need what the forward "
                        f"keeps, place them together"
                    )
                    raise fail(self, 6, message)

    def _check_axes(self, graph: Graph) -> None:
        if not isinstance(self.on, tuple) or not all(
            isinstance(pair, tuple) and [type(part) for part in pair] == [str, int]
            for pair in self.on
        ):
            text = "coordinates by axis are accepted, such as dict(pp=0)"
            raise fail(self, 1, f"on={self.on!r}; {text}")
        if not self.on:
            raise fail(self, 1, "on={} names no axis; give at least one, e.g. on=dict(pp=0)")
        for axis, at in self.on:
            if axis not in AXES:
                raise fail(
                    self, 1, f"unknown axis {axis!r}; the axes are {', '.join(sorted(AXES))}"
                )
            if shared_axes(graph, (axis,)):
                raise fail(
                    self,
                    7,
                    f"devices share the chunks over {axis} (by shard), so all of them run each; use another axis",
                )
            if axis in dict(graph.program.experts):
                text = (
                    f"devices share experts over {axis} (by shard), so all of them run each chunk"
                )
                raise fail(
                    self,
                    7,
                    f"{text}; give stages and experts an axis each, as pp and ep of Mesh(pp=2, ep=2)",
                )
            if not 0 <= at < graph.mesh.size(axis):
                size = graph.mesh.size(axis)
                raise fail(
                    self,
                    1,
                    f"{axis}={at} is outside of {graph.mesh}, where {axis} has {size} coordinate{'s' * (size > 1)}",
                )

    def _check_streams(self, graph: Graph, role: str) -> None:
        if COMPUTE in (self.send, self.recv):
            raise fail(self, 5, f"the stream {COMPUTE!r} is for compute; choose another name")
        known = graph.transports.get(role)
        if known is not None and known != TransferStreams(self.send, self.recv):
            raise fail(
                self,
                5,
                f"{role} sends on {known.send!r} and receives on {known.recv!r} by an earlier place; use the same "
                f"names",
            )

    def decided(self) -> Decided | None:
        """Return its decisions before it is compiled."""
        return Decided(self)

    def apply(self, graph: Graph) -> Graph:
        edit = graph.edit()
        fixed = dict(self.on)
        role = role_name(fixed)
        edit.roles[role] = fixed
        edit.transports[role] = TransferStreams(self.send, self.recv)
        by_phase: dict[str, list[Node]] = {}
        for node, phase in with_sums(graph, graph.pick(self.selection)):
            edit.update(on_role(node, role))
            by_phase.setdefault("B" if phase in ("R", "I") else phase, []).append(
                on_role(node, role)
            )
        for nodes in by_phase.values():
            _connect(edit, nodes)
        return edit.done()


def _other_phases(graph: Graph, node: Node) -> Iterator[Node]:
    """Yield the nodes of the other phases of a node's chunk, in its microbatches."""
    for phase in ("F", "B", "R", "I", "W"):
        if phase != node.coords["phase"]:
            for other in graph.compute(str(node.coords["chunk"]), phase):
                shared = common(other.mbs, node.mbs)
                if shared is None or shared:
                    yield in_mbs(other, shared)


def role_name(fixed: Mapping[str, int]) -> str:
    """Return "pp0", or "pp0.ep1" for several axes."""
    return ".".join(f"{axis}{at}" for axis, at in fixed.items())


def with_sums(graph: Graph, nodes: list[Node]) -> Iterator[tuple[Node, str]]:
    """Yield (node, phase), each node after the gradient sums that feed it, which run on the same ranks."""
    for node in nodes:
        phase = str(node.coords["phase"])
        if phase != "F":
            for value in node.reads:
                for writer, mbs in graph.writers_of(value, node.mbs):
                    if writer.coords["op"] == "add":
                        yield in_mbs(writer, mbs), phase
        yield node, phase


@dataclass(frozen=True, slots=True)
class _Crossing:
    """Name a value that `reader` reads on another role than its writer's, in the reader's microbatches."""

    value: str
    source: str
    reader: Node


def _connect(edit: Editor, nodes: list[Node]) -> None:
    """Add communication on the edges between newly placed nodes and nodes placed elsewhere.

    Channels are made one after the other, in the order of the first microbatch that needs each.
    """
    crossings = [crossing for node in nodes for crossing in _crossings(edit, node)]
    for at in sorted(crossings, key=lambda at: at.reader.each[0]):
        edit.channel(at.source, at.reader.role, edit.values[at.value].category)
    for at in crossings:
        copy = edit.transfer(at.value, at.source, at.reader.role, at.reader.mbs)
        edit.reread(at.reader, at.value, copy)


def _crossings(edit: Editor, node: Node) -> Iterator[_Crossing]:
    for value in node.reads:
        for writer, mbs in edit.writers_of(value, node.mbs):
            if writer.role not in ("", node.role):
                yield _Crossing(value, writer.role, in_mbs(node, mbs))
    for value in node.writes:
        for reader in edit.readers_of(value, node.mbs):
            if reader.role not in ("", node.role) and reader.coords["op"] in ("compute", "add"):
                yield _Crossing(value, node.role, reader)
