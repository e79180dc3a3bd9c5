"""place: run nodes on mesh coordinates, with point-to-point communication on the edges that cross.

    before  layer1.F@0 -> layer2.F@0
    after   layer1.F@0 on pp0 -> send on pp0, recv on pp1 -> layer2.F@0 on pp1        place(where(stage=1), on=dict(pp=1))

Legality
 1. `on` names axes of the mesh, with coordinates inside of it. (An axis of degree 1 is not an error.)
 2. No selected node is placed already.
 3. All placements of a strategy fix the same axes, so that two roles are equal or disjoint.
 4. Placed axes are not axes over which the nodes are replicated.
 5. The streams named for a role agree with those named by earlier placements on it, and differ from the compute stream.
 6. The backward of a chunk and microbatch runs where its forward runs: what the forward saved is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from piper_compiler.directives.base import call_site, compute_nodes, directive, fail, names, site_field
from piper_ir.graph import Editor, Graph, Node, Transport
from piper_ir.mesh import AXES
from piper_ir.plan import COMPUTE
from piper_ir.select import Where


@directive
@dataclass(frozen=True, init=False)
class Place:
    """Nodes run on all ranks that have the coordinates `on`. `send`, `recv`: names of the streams that carry what these nodes
    send and receive; by default each channel has a stream of its own."""

    selection: Where
    on: tuple[tuple[str, int], ...]
    send: str = ""
    recv: str = ""
    site: str = site_field()
    takes_over: ClassVar[bool] = True

    def __init__(
        self,
        selection: Where,
        on: Mapping[str, int] | tuple[tuple[str, int], ...],
        send: str = "",
        recv: str = "",
        site: str | None = None,
    ) -> None:
        object.__setattr__(self, "selection", selection)
        object.__setattr__(self, "on", tuple(sorted(dict(on).items())))
        object.__setattr__(self, "send", send)
        object.__setattr__(self, "recv", recv)
        object.__setattr__(self, "site", call_site() if site is None else site)

    def check(self, graph: Graph) -> None:
        self._check_axes(graph)
        nodes = compute_nodes(self, graph, self.selection)
        placed = [n for n in nodes if n.role]
        if placed:
            raise fail(self, 2, f"{names(placed)} is placed on {placed[0].role} already; a node runs in one place")
        fixed = dict(self.on)
        for role, other in graph.roles.items():
            if set(other) != set(fixed):
                message = f"it fixes {sorted(fixed)} but {role} fixes {sorted(other)}; give every placement the same axes"
                raise fail(self, 3, message)
        for node in nodes:
            over = graph.replication.get(str(node.coords["chunk"]))
            if over is not None and set(over.over) & set(fixed):
                raise fail(self, 4, f"{node.id} is replicated over {over.over}; a placed axis cannot be replicated too")
        self._check_streams(graph, role_name(fixed))
        for node in nodes:
            for twin in _other_phases(graph, node):
                if twin.role not in ("", role_name(fixed)):
                    message = f"{twin.id} is placed on {twin.role}; both phases need what the forward keeps, place them together"
                    raise fail(self, 6, message)

    def _check_axes(self, graph: Graph) -> None:
        if not self.on:
            raise fail(self, 1, "on={} says nothing; give at least one axis, e.g. on=dict(pp=0)")
        for axis, at in self.on:
            if axis not in AXES:
                raise fail(self, 1, f"unknown axis {axis!r}; the axes are {', '.join(sorted(AXES))}")
            if not 0 <= at < graph.mesh.size(axis):
                size = graph.mesh.size(axis)
                raise fail(
                    self, 1, f"{axis}={at} is outside of {graph.mesh}, where {axis} has {size} coordinate{'s' * (size > 1)}"
                )

    def _check_streams(self, graph: Graph, role: str) -> None:
        if COMPUTE in (self.send, self.recv):
            raise fail(self, 5, f"the stream {COMPUTE!r} is for compute; choose another name")
        known = graph.transports.get(role)
        if known is not None and known != Transport(self.send, self.recv):
            raise fail(
                self, 5, f"{role} sends on {known.send!r} and receives on {known.recv!r} by an earlier place; use the same names"
            )

    def apply(self, graph: Graph) -> Graph:
        edit = graph.edit()
        fixed = dict(self.on)
        role = role_name(fixed)
        edit.roles[role] = fixed
        edit.transports[role] = Transport(self.send, self.recv)
        nodes = with_sums(graph, graph.select(self.selection))
        for node in nodes:
            edit.update(Node(node.id, node.op, node.coords, node.reads, node.writes, role, node.stream))
        for node in nodes:
            _connect(edit, node.id, role)
        return edit.done()


def _other_phases(graph: Graph, node: Node) -> list[Node]:
    """The nodes of the other phases of a node's chunk and microbatch."""
    chunk, phase = node.coords["chunk"], node.coords["phase"]
    suffix = node.id.removeprefix(f"{chunk}.{phase}")
    found = (graph.nodes.get(f"{chunk}.{other}{suffix}") for other in ("F", "B", "I", "W") if other != phase)
    return [n for n in found if n is not None]


def role_name(fixed: Mapping[str, int]) -> str:
    """ "pp0", or "pp0.ep1" for several axes."""
    return ".".join(f"{axis}{at}" for axis, at in fixed.items())


def with_sums(graph: Graph, nodes: list[Node]) -> list[Node]:
    """The nodes, and the gradient sums that feed them: a sum runs where its chunk's backward runs."""
    out = []
    for node in nodes:
        if node.coords["phase"] != "F":
            writers = (graph.nodes.get(graph.writer.get(value, "")) for value in node.reads)
            out += [w for w in writers if w is not None and w.coords["op"] == "add"]
        out.append(node)
    return out


def _connect(edit: Editor, node_id: str, role: str) -> None:
    """Add communication on the edges between a newly placed node and nodes placed elsewhere."""
    nodes, node = edit.nodes, edit.nodes[node_id]
    for value in node.reads:
        writer = nodes.get(edit.writer.get(value, ""))
        if writer is not None and writer.role not in ("", role):
            edit.reread(node_id, value, edit.transfer(value, writer.role, role))
    for value in node.writes:
        for reader in edit.readers.get(value, ()):
            other = nodes[reader]
            if other.role not in ("", role) and other.coords["op"] in ("compute", "add"):
                edit.reread(reader, value, edit.transfer(value, role, other.role))
