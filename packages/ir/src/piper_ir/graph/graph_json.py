"""Define the document of a Graph, for `piper_ir.ground.codec`; writers, readers and the index are derived again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from piper_ir.graph.graph import (
    Applied,
    At,
    Graph,
    GraphValue,
    Node,
    Offloading,
    OverlapGroup,
    Replication,
    TransferStreams,
)
from piper_ir.graph.graph_parts import EdgeExchange, MessageOrder, in_mbs, mbs_of
from piper_ir.ground.codec import register
from piper_ir.ground.errors import FormatError
from piper_ir.ground.mesh import Mesh
from piper_ir.plan.plan import Bucket, Channel
from piper_ir.program.costs import Costs
from piper_ir.program.program import Program


@dataclass(frozen=True)
class GraphDocument:
    """Hold a Graph as it is written.

    Attributes:
        mbs: by node, the microbatches that it stands for; null for the whole step.
        order: before and after, each an id and a microbatch, and the index of the directive in `log`.
    """

    FORMAT: ClassVar[str] = "Graph"

    mesh: Mesh
    program: Program
    values: Mapping[str, GraphValue]
    nodes: tuple[Node, ...]
    mbs: tuple[tuple[int, ...] | None, ...] = ()
    order: tuple[tuple[At, At, int], ...] = ()
    overlaps: tuple[OverlapGroup, ...] = ()
    roles: Mapping[str, Mapping[str, int]] | None = None
    transports: Mapping[str, TransferStreams] | None = None
    channels: tuple[Channel, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    replication: Mapping[str, Replication] | None = None
    microbatches: int = 0
    log: tuple[Applied, ...] = ()
    costs: Costs | None = None
    exchanges: Mapping[str, EdgeExchange] | None = None
    offloading: Mapping[str, Offloading] | None = None
    hosted: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()
    message_orders: tuple[MessageOrder, ...] = ()


def to_document(graph: Graph) -> GraphDocument:
    """Return the document of a graph."""
    order = tuple((a, b, i) for (a, b), i in graph.order_edges.items())
    return GraphDocument(
        graph.mesh,
        graph.program,
        graph.values,
        graph.sequence,
        tuple([None if node.mbs is None else tuple(node.mbs) for node in graph.sequence]),
        order,
        graph.overlaps,
        graph.roles,
        graph.transports,
        tuple(graph.channels.values()),
        tuple(graph.buckets.values()),
        graph.replication,
        graph.microbatches,
        graph.log,
        graph.costs,
        graph.exchanges or None,
        graph.offloading or None,
        graph.hosted,
        graph.away,
        graph.eager,
        graph.message_orders,
    )


def from_document(document: GraphDocument) -> Graph:
    """Return the graph of a document; raise CompileError when a value has two writers."""
    if len(document.mbs) != len(document.nodes):
        counts = f"{len(document.nodes)} nodes and the microbatches of {len(document.mbs)}"
        raise FormatError(f"Graph: it has {counts}; one entry of mbs for each node is expected")
    index = {c.id: i for i, c in enumerate(document.program.chunks)}
    bare = Graph(
        document.mesh,
        document.program,
        {},
        document.values,
        {},
        {},
        log=document.log,
        costs=document.costs,
        chunk_index=index,
    )
    edit = bare.edit()
    for node, mbs in zip(document.nodes, document.mbs, strict=True):
        edit.add(node if mbs is None else in_mbs(node, mbs_of(mbs)))
    edit.order_edges = {(a, b): i for a, b, i in document.order}
    edit.overlaps = list(document.overlaps)
    edit.roles = dict(document.roles or {})
    edit.transports = dict(document.transports or {})
    edit.exchanges = dict(document.exchanges or {})
    edit.channels = {c.id: c for c in document.channels}
    edit.buckets = {b.id: b for b in document.buckets}
    edit.replication = dict(document.replication or {})
    edit.offloading = dict(document.offloading or {})
    edit.hosted, edit.away, edit.eager = document.hosted, document.away, document.eager
    edit.message_orders = list(document.message_orders)
    edit.microbatches = document.microbatches
    return edit.done()


register(Graph, GraphDocument, to_document, from_document)
