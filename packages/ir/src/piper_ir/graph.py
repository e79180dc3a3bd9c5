"""Graph: one global training DAG. Nodes carry coordinates, a placement (role) and a stream; data edges derive from values.

A Graph is immutable from outside. A directive takes one and returns another, made by an Editor: `edit = graph.edit(); ...;
edit.done()`. Copies are shallow, selection goes through an index by coordinate, so a directive costs time in the nodes that it
matches.

Node and value ids derive from structure: node "layer3.B@2" is the backward of chunk layer3 for microbatch 2, its value
"layer3:gin0@2"; "layer3:out0@2#pp1" is the copy received on role pp1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, cast

from piper_ir.costs import Costs
from piper_ir.errors import CompileError, SelectorError
from piper_ir.graph_parts import Applied, Coord, GraphValue, Node, OverlapGroup, Replication, Transport
from piper_ir.mesh import Mesh
from piper_ir.ops import Add, Recv, Send
from piper_ir.plan import Bucket, Category, Channel
from piper_ir.program import Program
from piper_ir.select import ANY, NONE, Match, Where
from piper_ir.sizes import TensorSpec

__all__ = [
    "Applied",
    "Coord",
    "Editor",
    "Graph",
    "GraphValue",
    "Node",
    "OverlapGroup",
    "Replication",
    "Transport",
]


@dataclass(frozen=True)
class Graph:
    """`nodes` in creation order. `writer` and `readers` are the data edges; `order_edges` maps (before, after) to the index in
    `log` of the directive that asked for it, `overlaps` are the groups that an order leaves open. `roles`: role -> the mesh
    coordinates that it fixes. `replication`: chunk -> how it is replicated. `costs`: what is known of durations, for directives
    that weigh."""

    mesh: Mesh
    program: Program
    nodes: Mapping[str, Node]
    values: Mapping[str, GraphValue]
    writer: Mapping[str, str]
    readers: Mapping[str, tuple[str, ...]]
    order_edges: Mapping[tuple[str, str], int] = field(default_factory=dict)
    overlaps: tuple[OverlapGroup, ...] = ()
    roles: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    transports: Mapping[str, Transport] = field(default_factory=dict)
    channels: Mapping[str, Channel] = field(default_factory=dict)
    buckets: Mapping[str, Bucket] = field(default_factory=dict)
    replication: Mapping[str, Replication] = field(default_factory=dict)
    microbatches: int = 0
    log: tuple[Applied, ...] = ()
    costs: Costs | None = None
    index: Mapping[tuple[str, Coord], tuple[str, ...]] = field(default_factory=dict, repr=False)
    chunk_index: Mapping[str, int] = field(default_factory=dict, repr=False)
    _sets: dict[tuple[str, Coord], frozenset[str]] = field(default_factory=dict, repr=False, compare=False)
    _selected: dict[Where, list[Node]] = field(default_factory=dict, repr=False, compare=False)
    _handed_over: bool = field(default=False, repr=False, compare=False)

    @property
    def replicated(self) -> tuple[str, ...]:
        """The axes of data parallelism: those of the first replicated chunk; a complete graph has the same for all."""
        return next(iter(self.replication.values())).over if self.replication else ()

    @property
    def replicas(self) -> int:
        """The data-parallel width: the product of the sizes of `replicated`."""
        return prod(self.mesh.size(axis) for axis in self.replicated)

    def hand_over(self) -> Graph:
        """This graph for one last edit, whose editor changes its tables in place instead of copying them. Neither it nor what is
        returned may be used afterwards."""
        return replace(self, _handed_over=True)

    def edit(self) -> Editor:
        return Editor(self)

    def coordinates(self) -> dict[str, list[Coord]]:
        """Every coordinate with its values, sorted: what a selector may name."""
        out: dict[str, set[Coord]] = {}
        for name, value in self.index:
            out.setdefault(name, set()).add(value)
        return {n: sorted(vs, key=lambda v: (isinstance(v, str), v)) for n, vs in sorted(out.items())}

    def select(self, selection: Where) -> list[Node]:
        """The selected nodes in topological order (F ascending, backward descending). Communication only when `op` asks for it.
        SelectorError when nothing matches."""
        known = self._selected.get(selection)
        if known is None:
            found = self.matching(selection)
            if not found:
                raise SelectorError(f"{selection} matches no node. {self._what_exists(_with_op(selection))}")
            known = self._selected[selection] = sorted(found, key=self.position) if len(found) > 1 else found
        return list(known)

    def matching(self, selection: Where) -> list[Node]:
        """The selected nodes in no order; none is no error."""
        terms = _with_op(selection)
        if terms["op"] == "compute":
            rest: list[tuple[str, Match]] = [term for term in terms.items() if term[1] in (ANY, NONE)]
            found = [self.nodes[id] for id in self._candidates(terms)]
        else:
            rest = list(terms.items())
            found = [self.nodes[id] for id in self._candidates({"op": terms["op"]})]
        if not rest:
            return found
        left = Where(tuple(rest))
        return [n for n in found if left.matches(n.coords)]

    def _candidates(self, terms: Mapping[str, object]) -> Iterable[str]:
        """Ids that have the wanted values of all terms but ANY and NONE: an intersection that costs time in the shortest list."""
        found: list[frozenset[str]] = []
        for name, wanted in terms.items():
            if wanted not in (ANY, NONE):
                keys = wanted if isinstance(wanted, tuple) else (wanted,)
                sets = [self._ids((name, k)) for k in keys]
                found.append(sets[0] if len(sets) == 1 else frozenset().union(*sets))
        if not found:
            return self.nodes
        found.sort(key=len)
        return found[0].intersection(*found[1:])

    def _ids(self, key: tuple[str, Coord]) -> frozenset[str]:
        ids = self._sets.get(key)
        if ids is None:
            ids = self._sets[key] = frozenset(self.index.get(key, ()))
        return ids

    def _what_exists(self, terms: Mapping[str, object]) -> str:
        there = self.coordinates()
        unknown = [t for t in terms if t not in there]
        if unknown:
            return f"There is no coordinate {unknown[0]!r}; there are {', '.join(there)}."
        shown = [f"{n} in {_span(there[n])}" for n in terms if n != "op"]
        return "There are nodes with " + ", ".join(shown) + "." if shown else "The graph has no such node."

    def position(self, node: Node) -> tuple[int, int, int, str]:
        """A sort key that is a topological order of any set of compute nodes: forward before backward, then by microbatch, then
        along the program (backward: against it)."""
        coords = node.coords
        rank = _RANKS.get(str(coords.get("phase")), 3)
        chunk = self.chunk_index.get(str(coords.get("chunk", "")), 0)
        after = 0 if isinstance(node.op, Add) else 1
        return rank, node.mb, (chunk if rank == 0 else -chunk) * 2 + after, node.id


_RANKS = {"F": 0, "B": 1, "I": 1, "W": 2}


def _with_op(selection: Where) -> dict[str, Match]:
    """The terms of a selection, which is one of compute nodes unless it says otherwise."""
    return {"op": "compute"} | dict(selection.terms)


def _span(values: list[Coord]) -> str:
    if len(values) > 4 and all(isinstance(v, int) for v in values):
        return f"{values[0]}..{values[-1]}"
    return ", ".join(map(str, values))


class Editor:
    """Builds the next Graph. Changes are visible to its own methods at once; the graph it came from stays as it was. The tables
    of nodes and values are copied when they first change: an `order` costs nothing for the nodes that it leaves alone."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._copied = graph._handed_over
        self._nodes = cast(dict[str, Node], graph.nodes)
        self._values = cast(dict[str, GraphValue], graph.values)
        self._writer = cast(dict[str, str], graph.writer)
        self._readers = cast(dict[str, tuple[str, ...]], graph.readers)
        self.order_edges = dict(graph.order_edges)
        self.overlaps = list(graph.overlaps)
        self.roles = dict(graph.roles)
        self.transports = dict(graph.transports)
        self.channels = dict(graph.channels)
        self.buckets = dict(graph.buckets)
        self.replication = dict(graph.replication)
        self.microbatches = graph.microbatches
        self._added: dict[tuple[str, Coord], list[str]] = {}
        self._removed: dict[str, Node] = {}
        self._index: Mapping[tuple[str, Coord], tuple[str, ...]] = graph.index

    @property
    def nodes(self) -> Mapping[str, Node]:
        return self._nodes

    @property
    def values(self) -> Mapping[str, GraphValue]:
        return self._values

    @property
    def writer(self) -> Mapping[str, str]:
        return self._writer

    @property
    def readers(self) -> Mapping[str, tuple[str, ...]]:
        return self._readers

    def _copy(self) -> None:
        self._copied = True
        self._nodes, self._values = dict(self._nodes), dict(self._values)
        self._writer, self._readers = dict(self._writer), dict(self._readers)

    @property
    def applied(self) -> int:
        """The index that the directive being applied will have in the log."""
        return len(self.graph.log)

    def add(self, node: Node) -> None:
        """Add a node whose values are known (see `value`); its id must be new and its writes must have no writer yet."""
        if not self._copied:
            self._copy()
        id, writer, readers = node.id, self._writer, self._readers
        if id in self._nodes:
            raise CompileError(f"two nodes with the id {id!r}")
        self._nodes[id] = node
        for v in node.writes:
            if v in writer:
                raise CompileError(f"value {v!r} has two writers: {writer[v]} and {id}")
            writer[v] = id
        for v in node.reads if len(node.reads) < 2 else dict.fromkeys(node.reads):
            readers[v] = (*readers[v], id) if v in readers else (id,)
        if node.coords.get("op") == "compute":
            self._index_compute(id, node.coords.items())
        elif "op" in node.coords:
            self._index_under(("op", node.coords["op"]), id)

    def _index_compute(self, id: str, coords: Iterable[tuple[str, Coord]]) -> None:
        """Compute is found by all of its coordinates, the rest by its `op` alone: selections of it are rare, and then all terms
        are checked."""
        for key in coords:
            self._index_under(key, id)

    def _index_under(self, key: tuple[str, Coord], id: str) -> None:
        added = self._added
        if key in added:
            added[key].append(id)
        else:
            added[key] = [id]

    def value(self, id: str, spec: TensorSpec, category: Category) -> str:
        """Declare a value; returns its id."""
        if not self._copied:
            self._copy()
        self._values[id] = GraphValue(spec, category)
        return id

    def same_values(self, ids: Iterable[str], value: GraphValue) -> None:
        """Declare values of one kind."""
        if not self._copied:
            self._copy()
        self._values.update(dict.fromkeys(ids, value))

    def update(self, node: Node) -> None:
        """Replace the node of the same id. Its coordinates may gain names (partition) but not change those it had; reads may
        change."""
        if not self._copied:
            self._copy()
        old = self._nodes[node.id]
        if old.reads != node.reads:
            for v in dict.fromkeys(old.reads):
                if v not in node.reads:
                    self._readers[v] = tuple(r for r in self._readers[v] if r != node.id)
            for v in dict.fromkeys(node.reads):
                if v not in old.reads:
                    self._readers[v] = (*self._readers.get(v, ()), node.id)
        if node.coords is not old.coords:
            gained = [key for key in node.coords.items() if key[0] not in old.coords]
            if node.coords.get("op") == "compute":
                self._index_compute(node.id, gained)
            elif any(name == "op" for name, _ in gained):
                self._index_under(("op", node.coords["op"]), node.id)
        self._nodes[node.id] = node

    def replace(self, parts: Mapping[str, Sequence[Node]]) -> None:
        """Put other nodes where nodes stand: between them they read and write the same values, and may hand each other some of
        those. In time linear in the graph, so all replacements of a directive are one call."""
        order = list(self._nodes)
        for old in parts:
            node = self._nodes[old]
            if not self._copied:
                self._copy()
            self._removed[old] = self._nodes.pop(old)
            for v in dict.fromkeys(node.reads):
                self._readers[v] = tuple([r for r in self._readers[v] if r != old])
            for v in node.writes:
                del self._writer[v]
        for new in parts.values():
            for node in new:
                self.add(node)
        self._nodes = {n.id: n for old in order for n in (parts[old] if old in parts else (self._nodes[old],))}

    def reread(self, node_id: str, old: str, new: str) -> None:
        """Let a node read another value in place of one."""
        node = self._nodes[node_id]
        reads = (new,) if node.reads == (old,) else tuple([new if v == old else v for v in node.reads])
        self.update(Node(node.id, node.op, node.coords, reads, node.writes, node.role, node.stream))

    def order(self, before: str, after: str) -> None:
        """Ask that `before` runs before `after`; the first directive that asked is remembered."""
        self.order_edges.setdefault((before, after), self.applied)

    def transfer(self, value: str, source: str, to: str) -> str:
        """The id of the copy of `value` on role `to`, with a Send and a Recv made on first use. One per (value, destination)."""
        copy = f"{value}#{to}"
        if copy in self._values:
            return copy
        writer, held = self._nodes[self._writer[value]], self._values[value]
        id = f"{source}>{to}.{'grad' if held.category == 'gradient' else 'act'}"
        channel = self.channels.get(id)
        if channel is None:
            streams = self.transports[source].send or id, self.transports[to].recv or id
            purpose: Literal["gradient", "activation"] = "gradient" if held.category == "gradient" else "activation"
            channel = self.channels[id] = Channel(id, "p2p", (source, to), streams, purpose=purpose)
        self.same_values((copy,), held)
        coords = writer.coords
        self.add(Node(f"send.{copy}", Send(id), {**coords, "op": "send"}, (value,), (), source, channel.streams[0]))
        self.add(Node(f"recv.{copy}", Recv(id), {**coords, "op": "recv"}, (), (copy,), to, channel.streams[1]))
        return copy

    def done(self, applied: Applied | None = None) -> Graph:
        """The edited graph; `applied` is appended to its log."""
        index = dict(self._index)
        stale = {key for node in self._removed.values() for key in node.coords.items()}
        for key in stale & index.keys():
            index[key] = tuple([id for id in index[key] if id not in self._removed])
        for key, ids in self._added.items():
            index[key] = (*index.get(key, ()), *ids)
        index = {key: ids for key, ids in index.items() if ids} if stale else index
        sets = {k: v for k, v in self.graph._sets.items() if k not in self._added and k not in stale}
        return replace(
            self.graph,
            nodes=self.nodes,
            values=self.values,
            writer=self.writer,
            readers=self.readers,
            order_edges=self.order_edges,
            overlaps=tuple(self.overlaps),
            roles=self.roles,
            transports=self.transports,
            channels=self.channels,
            buckets=self.buckets,
            replication=self.replication,
            microbatches=self.microbatches,
            log=(*self.graph.log, applied) if applied else self.graph.log,
            index=index,
            _sets=sets,
            _selected={},
            _handed_over=False,
        )
