"""split_backward: let the input gradient and the weight gradient of a backward be ordered apart.

    before  layer1.B@0
    after   layer1.I@0 -> layer1.W@0        split_backward(where(layer=1))

I takes the gradient that comes from later stages and gives the one for earlier stages; W adds into the parameters' gradients
and may run any time later. From I to W a chunk keeps only what W needs. A backward without anything for W to do becomes an I
alone, one that passes no gradient on (an embedding) a W alone.

Legality
 1. Backwards are selected (a selection without `phase` may hold forwards, too), unless its chunks have none, being frozen.
 2. None of them is split already.
 3. No order names them: write split_backward before order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from piper_compiler.directives.base import compute_nodes, directive, fail, names, site_field
from piper_compiler.ports import BACKWARD, port_value, signatures, value_reads, value_writes
from piper_ir.graph import Coord, Graph, Node
from piper_ir.ops import Add, Compute
from piper_ir.program import Chunk
from piper_ir.select import Where


@directive
@dataclass(frozen=True)
class SplitBackward:
    """The selected nodes of phase B become one of phase I and one of phase W each."""

    selection: Where
    site: str = site_field()

    def check(self, graph: Graph) -> None:
        nodes = compute_nodes(self, graph, self.selection)
        split = [n for n in nodes if n.coords["phase"] in BACKWARD]
        if split:
            raise fail(self, 2, f"{names(split)} is of a backward that is split already")
        backwards = {n.id for n in nodes if n.coords["phase"] == "B"}
        if not backwards and any(signatures(graph.program.chunk(str(n.coords["chunk"])), "B") for n in nodes):
            raise fail(self, 1, f"{names(nodes)} is no backward; select phase='B', or leave phase out")
        for edge, applied in graph.order_edges.items():
            for id in edge:
                if id in backwards:
                    by = f" ({graph.log[applied]})" if applied < len(graph.log) else ""
                    raise fail(self, 3, f"{id} is ordered already{by}; write split_backward before order")
        for group in graph.overlaps:
            for id in group.nodes:
                if id in backwards:
                    raise fail(self, 3, f"{id} is in an overlap already; write split_backward before order")

    def apply(self, graph: Graph) -> Graph:
        edit = graph.edit()
        makers: dict[str, _Parts] = {}
        parts: dict[str, dict[str, tuple[Node, ...]]] = {}
        for node in graph.select(self.selection):
            if node.coords["phase"] == "B":
                chunk = str(node.coords["chunk"])
                if chunk not in makers:
                    makers[chunk] = _Parts(graph.program.chunk(chunk))
                parts.setdefault(chunk, {})[node.id] = makers[chunk].of(node)
        edit.replace({old: new for mine in parts.values() for old, new in _by_step(mine).items()})
        for old, new in (item for mine in parts.values() for item in mine.items()):
            for value in graph.nodes[old].reads:  # a sum that feeds it runs with its first part
                feeder = graph.nodes.get(graph.writer.get(value, ""))
                if feeder is not None and isinstance(feeder.op, Add):
                    edit.update(replace(feeder, coords={**feeder.coords, "phase": new[0].coords["phase"]}))
        return edit.done()


def _by_step(parts: Mapping[str, Sequence[Node]]) -> dict[str, Sequence[Node]]:
    """Which nodes stand where the backwards of a chunk stood: all I, then all W, as if it had been split before its
    microbatches were."""
    first, *others = parts
    return {first: [node for step in zip(*parts.values(), strict=True) for node in step], **dict.fromkeys(others, ())}


class _Parts:
    """Makes the nodes that stand for the backwards of a chunk. Microbatches share the ops."""

    def __init__(self, chunk: Chunk) -> None:
        self.whole, self.reads = f"{chunk.id}.B", value_reads(chunk, "B")
        self.steps = []
        for step in BACKWARD:
            if signatures(chunk, step):
                reads = tuple((p, port_value(chunk, p)) for p in value_reads(chunk, step))
                writes = tuple(f"{chunk.id}:{p}" for p in value_writes(chunk, step))
                self.steps.append((f"{chunk.id}.{step}", Compute(chunk.id, step), reads, writes))

    def of(self, node: Node) -> tuple[Node, ...]:
        """What the parts read is what the backward read, which may be copies that place has made."""
        suffix = node.id.removeprefix(self.whole)
        known = dict(zip(self.reads, node.reads, strict=True))
        out = []
        for id, op, reads, writes in self.steps:
            coords: dict[str, Coord] = {**node.coords, "phase": op.step}
            values = tuple([known[port] if port in known else value + suffix for port, value in reads])
            made = tuple([value + suffix for value in writes])
            out.append(Node(id + suffix, op, coords, values, made, node.role, node.stream))
        return tuple(out)
