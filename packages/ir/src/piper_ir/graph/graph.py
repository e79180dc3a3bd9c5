"""Define Graph, one global training DAG, and Editor, which makes the next one.

Nodes carry coordinates, a placement (role) and a stream; data edges derive from values. A node stands for all
microbatches that run it alike. Nodes of one id differ in their microbatches: a directive that selects some of
them splits a node. So a graph, and the time that a directive takes, do not grow with the number of microbatches.

A Graph is immutable from outside. A directive takes one and returns another, made by an Editor: `edit = graph.edit();
...; edit.done()`. Selection goes through an index by coordinate, so a directive takes time only for the nodes that it
matches.

Ids derive from structure: node "layer3.B" is the backward of chunk layer3, its value "layer3:gin0"; "layer3:out0#pp1"
is the copy received on role pp1. In microbatch 2 they are called "layer3.B@2", "layer3:gin0@2", "layer3:out0@2#pp1",
and `Graph.nodes` shows them so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, TypeVar

from piper_ir.graph.graph_names import NamedNodes
from piper_ir.graph.graph_parts import (
    Applied,
    At,
    Coord,
    EdgeExchange,
    GraphValue,
    Mbs,
    MessageOrder,
    Node,
    Offloading,
    OverlapGroup,
    Replication,
    TransferStreams,
    common,
    in_mbs,
    joined_nodes,
    mbs_of,
    with_mbs,
    without,
)
from piper_ir.graph.graph_select import Selecting, Terms
from piper_ir.ground.errors import CompileError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.node_ids import compute_id, named, send_id
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import Bucket, Category, Channel
from piper_ir.program.costs import Costs
from piper_ir.program.ops import Recv, Send
from piper_ir.program.program import Program

__all__ = [
    "Applied",
    "At",
    "Coord",
    "Editor",
    "Graph",
    "GraphValue",
    "Mbs",
    "Node",
    "Offloading",
    "OverlapGroup",
    "Replication",
    "TransferStreams",
]

K = TypeVar("K")


@dataclass(frozen=True, repr=False)
class Graph(NamedNodes, Selecting):
    """Hold the training DAG of one step.

    Attributes:
        program: the chunks that the nodes compute.
        families: id -> its nodes, which differ in their microbatches.
        writers: value -> the ids of the nodes that write it.
        users: value -> the ids of the nodes that read it.
        order_edges: (before, after) -> the index in `log` of the directive that asked for it.
        message_orders: orders that name messages of buckets, until there are buckets.
        overlaps: the groups that an order leaves open.
        roles: role -> the mesh coordinates that it fixes.
        transports: role -> its streams for point-to-point communication.
        exchanges: axis -> how its devices exchange values between chunks: tokens of experts, or partial sums.
        buckets: gradients that are reduced together.
        replication: chunk -> how it is replicated.
        offloading: chunk -> which of its tensors wait for its backward in the memory of the host.
        hosted: the chunks whose optimizer and its states are on the host.
        away: the chunks among them whose parameters are there, too.
        eager: the chunks whose operations torch runs one by one, whichever kernels the others have.
        microbatches: how many; 0 before the batch is split.
        log: the directives that were applied.
        costs: known durations, for directives that weigh layers.
        index: coordinate and value -> the ids that have it.
        chunk_index: chunk -> its position along the program.
    """

    mesh: Mesh
    program: Program
    families: Mapping[str, tuple[Node, ...]]
    values: Mapping[str, GraphValue]
    writers: Mapping[str, tuple[str, ...]]
    users: Mapping[str, tuple[str, ...]]
    order_edges: Mapping[tuple[At, At], int] = field(default_factory=dict)
    overlaps: tuple[OverlapGroup, ...] = ()
    roles: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    transports: Mapping[str, TransferStreams] = field(default_factory=dict)
    exchanges: Mapping[str, EdgeExchange] = field(default_factory=dict)
    channels: Mapping[str, Channel] = field(default_factory=dict)
    buckets: Mapping[str, Bucket] = field(default_factory=dict)
    replication: Mapping[str, Replication] = field(default_factory=dict)
    offloading: Mapping[str, Offloading] = field(default_factory=dict)
    hosted: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()
    message_orders: tuple[MessageOrder, ...] = ()
    microbatches: int = 0
    log: tuple[Applied, ...] = ()
    costs: Costs | None = None
    index: Mapping[tuple[str, Coord], tuple[str, ...]] = field(default_factory=dict, repr=False)
    chunk_index: Mapping[str, int] = field(default_factory=dict, repr=False)
    _found: dict[Terms, list[Node]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _kept: dict[int, tuple[object, object]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _alike: dict[Terms, list[tuple[str, str, Sequence[str]]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def replicated(self) -> tuple[str, ...]:
        """Return the axes of data parallelism, taken from the first replicated chunk; a complete graph has one set."""
        return next(iter(self.replication.values())).over if self.replication else ()

    @property
    def replicas(self) -> int:
        """Return the data-parallel width: the product of the sizes of `replicated`."""
        return prod(self.mesh.size(axis) for axis in self.replicated)

    def edit(self) -> Editor:
        """Return an Editor for another graph."""
        return Editor(self)

    def compute(self, chunk: str, step: str) -> tuple[Node, ...]:
        """Return the nodes that compute a step of a chunk, by their first microbatch."""
        family = self.families.get(compute_id(chunk, step), ())
        return family if len(family) < 2 else tuple(sorted(family, key=lambda n: n.each[0]))

    def writers_of(self, value: str, mbs: Mbs | None) -> Iterator[tuple[Node, Mbs | None]]:
        """Yield the nodes that write a value, each with the microbatches in which it does."""
        return _writers(self.families, self.writers, value, mbs)


def _writers(
    families: Mapping[str, tuple[Node, ...]],
    writers: Mapping[str, tuple[str, ...]],
    value: str,
    mbs: Mbs | None,
) -> Iterator[tuple[Node, Mbs | None]]:
    for id in writers.get(value, ()):
        for node in families[id]:
            shared = common(node.mbs, mbs)
            if value in node.writes and (shared is None or shared):
                yield node, shared


class Editor:
    """Build the next Graph.

    Changes are visible to its own methods at once; the graph it came from stays as it was. Nodes and values may also be
    named as in `Graph.nodes`, which takes time in the number of microbatches.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.families = dict(graph.families)
        self.values = dict(graph.values)
        self._writers = dict(graph.writers)
        self._users = dict(graph.users)
        self.order_edges = dict(graph.order_edges)
        self.message_orders = list(graph.message_orders)
        self.overlaps = list(graph.overlaps)
        self.roles = dict(graph.roles)
        self.transports = dict(graph.transports)
        self.exchanges = dict(graph.exchanges)
        self.channels = dict(graph.channels)
        self.buckets = dict(graph.buckets)
        self.replication = dict(graph.replication)
        self.offloading = dict(graph.offloading)
        self.hosted = graph.hosted
        self.away = graph.away
        self.eager = graph.eager
        self.microbatches = graph.microbatches
        self._index = dict(graph.index)
        self._entered: dict[
            tuple[str, Coord], dict[str, None]
        ] = {}  # the entries of the index that changed
        self._made = graph.sequence[-1].made + 1 if graph.families else 0

    @property
    def nodes(self) -> Mapping[str, Node]:
        """Return the present nodes, as in `Graph.nodes`; likewise `writer` and `readers`."""
        return self.done().nodes

    @property
    def writer(self) -> Mapping[str, str]:
        return self.done().writer

    @property
    def readers(self) -> Mapping[str, tuple[str, ...]]:
        return self.done().readers

    @property
    def applied(self) -> int:
        """Return the index that the directive being applied will have in the log."""
        return len(self.graph.log)

    def writers_of(self, value: str, mbs: Mbs | None) -> Iterator[tuple[Node, Mbs | None]]:
        """Yield the nodes that write a value, each with the microbatches in which it does."""
        return _writers(self.families, self._writers, value, mbs)

    def readers_of(self, value: str, mbs: Mbs | None) -> Iterator[Node]:
        """Yield the nodes that read a value in these microbatches, each reduced to the microbatches that read it."""
        for id in self._users.get(value, ()):
            for node in self.families[id]:
                shared = common(node.mbs, mbs)
                if value in node.reads and (shared is None or shared):
                    yield node if shared is None else in_mbs(node, shared)

    def add(self, node: Node) -> None:
        """Add a node whose values are known (see `value`).

        No other node of its id has its microbatches, and its writes have no writer in them yet.
        """
        family = self.families.get(node.id, ())
        if any(_meet(node.mbs, other.mbs) for other in family):
            raise CompileError(f"two nodes with the id {node.id!r}")
        for v in node.writes:
            for other, _ in self.writers_of(v, node.mbs):
                raise CompileError(f"value {v!r} has two writers: {other.id} and {node.id}")
            if node.id not in (known := self._writers.get(v, ())):
                self._writers[v] = (*known, node.id)
        node = with_mbs(node, node.mbs, self._made)
        self._made += 1
        self.families[node.id] = (*family, node)
        self._use(node)
        self._index_node(node)

    def _use(self, node: Node) -> None:
        for v in node.reads:
            if node.id not in (known := self._users.get(v, ())):
                self._users[v] = (*known, node.id)

    def _index_node(self, node: Node) -> None:
        """Enter a node in the index: compute by all of its coordinates, other nodes by `op` alone.

        Other nodes are rarely selected, and then all terms are checked.
        """
        coords = node.coords
        keys = (
            coords.items()
            if coords.get("op") == "compute"
            else [("op", coords["op"])]
            if "op" in coords
            else []
        )
        for key in keys:
            ids = self._entered.get(key)
            if ids is None:
                ids = self._entered[key] = dict.fromkeys(self._index.get(key, ()))
            ids[node.id] = None

    def value(self, id: str, spec: TensorSpec, category: Category) -> str:
        """Declare a value; return its id."""
        self.values[id] = GraphValue(spec, category)
        return id

    def update(self, node: Node) -> None:
        """Put a node in place of the nodes of its id, in its microbatches.

        Its coordinates may gain names (partition), but keep the ones that they had; its reads may change.
        """
        if node.id not in self.families:
            node = self._as_family(node)
        nodes: list[Node] = []
        for old in self.families[node.id]:
            shared = common(old.mbs, node.mbs)
            if shared is not None and not shared:
                nodes.append(old)
                continue
            if shared is not None and old.mbs is not None and (rest := without(old.mbs, shared)):
                nodes.append(in_mbs(old, rest))
            nodes.append(replace(node, mbs=shared, tail=old.tail, made=old.made))
            if node.coords is not old.coords:
                self._index_node(node)
            if node.reads is not old.reads:
                self._use(node)
        left = {
            v for old in self.families[node.id] if old.reads is not node.reads for v in old.reads
        }
        family = self.families[node.id] = joined_nodes(nodes)
        for v in left.difference(v for one in family for v in one.reads):
            self._users[v] = tuple([id for id in self._users[v] if id != node.id])

    def _as_family(self, node: Node) -> Node:
        """Return the family's node for a node that is named as in `Graph.nodes`."""
        id, mb = self.graph.places[node.id]
        old = self.graph.at((id, mb))
        assert old is not None
        coords = {name: value for name, value in node.coords.items() if name != "mb"}
        reads = tuple([self._value_at(v)[0] for v in node.reads])
        return replace(
            node, id=id, coords=coords, reads=reads, writes=old.writes, mbs=mbs_of((mb,))
        )

    def _value_at(self, name: str) -> At:
        if name in self.values:
            return name, -1
        return next(
            (v, mb)
            for v, graph_value in self.values.items()
            for mb in range(self.microbatches)
            if named(v, graph_value.tail, mb) == name
        )

    def remove(self, nodes: Iterable[Node]) -> None:
        """Remove nodes in their microbatches; other nodes are added that write the same values."""
        for node in nodes:
            left = []
            for old in self.families[node.id]:
                shared = common(old.mbs, node.mbs)
                if (
                    shared is not None
                    and old.mbs is not None
                    and (rest := without(old.mbs, shared))
                ):
                    left.append(in_mbs(old, rest))
            if left:
                self.families[node.id] = tuple(left)
                continue
            del self.families[node.id]
            self._writers, self._users = _less(self._writers, node.id), _less(self._users, node.id)
            self._index = _less(self._index, node.id)
            for ids in self._entered.values():
                ids.pop(node.id, None)

    def reread(self, node: Node | str, old: str, new: str) -> None:
        """Let a node read the value `new` in place of `old`."""
        if isinstance(node, str):
            id, mb = (node, -1) if node in self.families else self.graph.places[node]
            candidates = [n for n in self.families[id] if mb in n.each]
            node = candidates[0] if mb < 0 else in_mbs(candidates[0], mbs_of((mb,)))
            old, new = self._value_at(old)[0], self._value_at(new)[0]
        for mine in [n for n in self.families[node.id] if old in n.reads]:
            shared = common(mine.mbs, node.mbs)
            if shared is None or shared:
                self.update(
                    replace(
                        mine, mbs=shared, reads=tuple([new if v == old else v for v in mine.reads])
                    )
                )

    def order(self, before: At | str, after: At | str) -> None:
        """Ask that `before` runs before `after`; the first directive that asked is remembered."""
        pair = self._place(before), self._place(after)
        self.order_edges.setdefault(pair, self.applied)

    def _place(self, node: At | str) -> At:
        if not isinstance(node, str):
            return node
        return self.graph.places.get(node, (node, -1))

    def channel(self, source: str, to: str, category: Category) -> Channel:
        """Return the channel between two roles, made on first use."""
        purpose: Literal["gradient", "activation"] = (
            "gradient" if category == "gradient" else "activation"
        )
        id = f"{source}>{to}.{'grad' if purpose == 'gradient' else 'act'}"
        channel = self.channels.get(id)
        if channel is None:
            streams = self.transports[source].send or id, self.transports[to].recv or id
            channel = self.channels[id] = Channel(id, "p2p", (source, to), streams, purpose=purpose)
        return channel

    def transfer(self, value: str, source: str, to: str, mbs: Mbs | None = None) -> str:
        """Return the id of the copy of `value` on role `to`, with a Send and a Recv that are made on first use.

        There is one copy per value, destination and microbatch.
        """
        if value not in self.values:
            value, mb = self._value_at(value)
            self.transfer(value, source, to, mbs_of((mb,)))
            return named(f"{value}#{to}", f"#{to}", mb)
        original, tail = self.values[value], f"#{to}"
        copy, channel = value + tail, self.channel(source, to, original.category)
        for _, known in self.writers_of(copy, mbs):
            mbs = None if mbs is None or known is None else without(mbs, known)
            if not mbs:
                return copy
        self.values[copy] = GraphValue(original.spec, original.category, tail)
        for writer, some in list(self.writers_of(value, mbs)):
            send, recv = ({**writer.coords, "op": op} for op in ("send", "recv"))
            self.add(
                Node(
                    send_id(copy),
                    Send(channel.id),
                    send,
                    (value,),
                    (),
                    source,
                    channel.streams[0],
                    some,
                    tail,
                )
            )
            self.add(
                Node(
                    f"recv.{copy}",
                    Recv(channel.id),
                    recv,
                    (),
                    (copy,),
                    to,
                    channel.streams[1],
                    some,
                    tail,
                )
            )
        return copy

    def done(self, applied: Applied | None = None) -> Graph:
        """Return the edited graph; `applied` is appended to its log."""
        return replace(
            self.graph,
            families=self.families,
            values=self.values,
            writers={v: ids for v, ids in self._writers.items() if ids},
            users={v: ids for v, ids in self._users.items() if ids},
            order_edges=self.order_edges,
            message_orders=tuple(self.message_orders),
            overlaps=tuple(self.overlaps),
            roles=self.roles,
            transports=self.transports,
            exchanges=self.exchanges,
            channels=self.channels,
            buckets=self.buckets,
            replication=self.replication,
            offloading=self.offloading,
            hosted=self.hosted,
            away=self.away,
            eager=self.eager,
            microbatches=self.microbatches,
            log=(*self.graph.log, applied) if applied else self.graph.log,
            index={
                key: ids
                for key, ids in (
                    self._index | {k: tuple(ids) for k, ids in self._entered.items()}
                ).items()
                if ids
            },
        )


def _less(table: dict[K, tuple[str, ...]], gone: str) -> dict[K, tuple[str, ...]]:
    return {
        key: tuple([id for id in ids if id != gone]) if gone in ids else ids
        for key, ids in table.items()
    }


def _meet(a: Mbs | None, b: Mbs | None) -> bool:
    shared = common(a, b)
    return shared is None or bool(shared)
