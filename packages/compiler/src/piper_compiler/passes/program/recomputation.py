"""Keep recomputation late: an R that no order names runs when its backward could, as if it were a part of it.

R needs no gradient, so that list scheduling would run it right after its forward and hold its results for long. So it
gets the predecessors of its backward, by data and by order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from piper_ir.graph.graph import At, Graph
from piper_ir.ground.node_ids import compute_id
from piper_ir.program.ops import Collective, Compute


def late_recomputation(graph: Graph) -> dict[str, list[str]]:
    """Return the nodes of recomputation that no order names, each with the nodes of the backward that follow it."""
    again = [
        f[0].op.chunk
        for f in graph.families.values()
        if isinstance(f[0].op, Compute) and f[0].op.step == "R"
    ]
    if not again:
        return {}
    named = {
        id
        for ats in (*graph.order_edges, *(group.nodes for group in graph.overlaps))
        for id, _ in ats
    }
    followers: dict[str, list[str]] = {}
    for chunk in again:
        if compute_id(chunk, "R") not in named:
            last = _last_of_group(graph, chunk)
            whole = [id for step in ("B", "I") if (id := compute_id(last, step)) in graph.families]
            followers[compute_id(chunk, "R")] = whole or [compute_id(last, "W")]
    return followers


def _last_of_group(graph: Graph, chunk: str) -> str:
    """Return the last chunk of a chain of recomputations, each from the one before, beginning with this chunk."""
    while True:
        written = {
            v for node in graph.families.get(compute_id(chunk, "R"), ()) for v in node.writes
        }
        last = max([chunk, *_readers(graph, written)], key=graph.chunk_index.__getitem__)
        if last == chunk:
            return chunk
        chunk = last


def _readers(graph: Graph, values: Iterable[str]) -> Iterator[str]:
    """Yield the chunks that read some values, also after an exchange."""
    for node in (
        node for v in values for id in graph.users.get(v, ()) for node in graph.families[id]
    ):
        if isinstance(node.op, Collective):
            yield from _readers(graph, node.writes)
        else:
            yield str(node.coords["chunk"])


def ordered_late(graph: Graph, late: Mapping[str, list[str]]) -> Mapping[tuple[At, At], int]:
    """Return the order edges; nodes that they put before a backward come before its late recomputation, too."""
    again: dict[str, list[str]] = {}
    for r, ids in late.items():
        for id in ids:
            again.setdefault(id, []).append(r)
    edges = dict(graph.order_edges)
    for (before, (id, mb)), applied in graph.order_edges.items():
        for r in again.get(id, ()):
            if graph.at((r, mb)) is not None:
                edges.setdefault((before, (r, mb)), applied)
    return edges
