"""Define `split_backward`: let the input gradient and the weight gradient of a backward be ordered apart.

    before  layer1.B@0
    after   layer1.I@0 -> layer1.W@0        split_backward(where(layer=1))

I takes the gradient that comes from later stages and makes the one for earlier stages. W adds into the parameters'
gradients and may run any time later. From I to W a chunk keeps only the saved tensors that W needs. A backward that
trains nothing becomes an I alone; one that passes no gradient on (an embedding) becomes a W alone. Under a policy of
recomputation, R goes with the first of them.

Legality
 1. Backwards are selected (a selection without `phase` may hold forwards, too), unless all its chunks are frozen.
 2. None of them is split already.
 3. No order names them: write split_backward before order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from piper_compiler.directives.base import compute_nodes, directive, fail, names, site_field
from piper_compiler.directives.decided import Decided
from piper_compiler.ports import BACKWARD, port_value, signatures, value_reads, value_writes
from piper_ir.graph.graph import At, Coord, Graph, Node
from piper_ir.ground.node_ids import compute_id
from piper_ir.ground.select import Where
from piper_ir.program.ops import Add, Compute, Op
from piper_ir.program.program import Chunk


@directive
@dataclass(frozen=True)
class SplitBackward:
    """Replace each selected node of phase B by one of phase I and one of phase W."""

    selection: Where
    site: str = site_field()

    def check(self, graph: Graph) -> None:
        nodes = compute_nodes(self, graph, self.selection)
        split = [n for n in nodes if n.coords["phase"] in BACKWARD]
        if split:
            raise fail(
                self,
                2,
                f"{names(graph, split)} belongs to a backward that is split already; select each once",
            )
        backwards = [n for n in nodes if n.coords["phase"] == "B"]
        if not backwards and any(
            signatures(graph.program.chunk(str(n.coords["chunk"])), "B") for n in nodes
        ):
            raise fail(
                self,
                1,
                f"{names(graph, nodes)} is no backward; select phase='B', or leave phase out",
            )
        if graph.order_edges or graph.overlaps:
            self._check_unordered(
                graph, {(n.id, mb): n.name(mb) for n in backwards for mb in n.each}
            )

    def _check_unordered(self, graph: Graph, backwards: Mapping[At, str]) -> None:
        """Check condition 3 for the selected backwards, given with their names."""
        for edge, applied in graph.order_edges.items():
            for at in edge:
                if at in backwards:
                    by = f" ({graph.log[applied]})" if applied < len(graph.log) else ""
                    raise fail(
                        self,
                        3,
                        f"{backwards[at]} is ordered already{by}; write split_backward before order",
                    )
        for group in graph.overlaps:
            for at in group.nodes:
                if at in backwards:
                    raise fail(
                        self,
                        3,
                        f"{backwards[at]} is in an overlap already; write split_backward before order",
                    )

    def decided(self) -> Decided | None:
        """Return its decisions before it is compiled.

        Its single microbatch is split if any is: each of I and W needs no more than a whole backward.
        """
        terms = tuple([term for term in self.selection.terms if term[0] != "mb"])
        return Decided(replace(self, selection=Where.of(terms)))

    def apply(self, graph: Graph) -> Graph:
        edit = graph.edit()
        makers: dict[Op, _Parts] = {}
        for node in graph.pick(self.selection):
            if node.coords["phase"] != "B":
                continue
            op = node.op
            assert isinstance(op, Compute), "B is a step of a chunk"
            if op not in makers:
                makers[op] = _Parts(graph.program.chunk(op.variant), op.apart)
            parts = makers[op].of(node)
            edit.remove((node,))
            for part in parts:
                edit.add(part)
            for value in node.reads:  # a sum that feeds it runs with its first part
                for feeder, mbs in list(edit.writers_of(value, node.mbs)):
                    if isinstance(feeder.op, Add):
                        edit.update(
                            replace(
                                feeder,
                                mbs=mbs,
                                coords={**feeder.coords, "phase": parts[0].coords["phase"]},
                            )
                        )
        return edit.done()


class _Parts:
    """Make the nodes that replace the backwards of a chunk, or of a variant; they share the ops."""

    def __init__(self, chunk: Chunk, apart: bool) -> None:
        self.reads = value_reads(chunk, "B", apart)
        self.steps = []
        for step in BACKWARD:
            if signatures(chunk, step):
                reads = tuple((p, port_value(chunk, p)) for p in value_reads(chunk, step, apart))
                writes = tuple(f"{chunk.id}:{p}" for p in value_writes(chunk, step, apart))
                self.steps.append(
                    (
                        compute_id(chunk.id, step),
                        Compute(chunk.id, step, chunk.keep, apart),
                        reads,
                        writes,
                    )
                )

    def of(self, node: Node) -> tuple[Node, ...]:
        """Return the nodes for a backward; they read the same values, which may be copies that `place` made."""
        known = dict(zip(self.reads, node.reads, strict=True))
        nodes = []
        for id, op, reads, writes in self.steps:
            coords: dict[str, Coord] = {**node.coords, "phase": op.step}
            values = tuple([known.get(port, value) for port, value in reads])
            nodes.append(Node(id, op, coords, values, writes, node.role, node.stream, node.mbs))
        return tuple(nodes)
