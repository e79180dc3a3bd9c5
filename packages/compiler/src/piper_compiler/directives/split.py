"""Define `split`: partition the rows of the batch into microbatches.

    before  layer0.F             layer0.B
    after   layer0.F@0 mb=0  layer0.F@1 mb=1  layer0.B@0 mb=0  layer0.B@1 mb=1        split(where(), microbatches=2)

Legality
 1. microbatches is at least 1.
 2. The batch is split once.
 3. All nodes are selected: `where()`. (A part of the model that sees other microbatches than the rest has no
    single-device equivalent.)
 4. Nothing is placed yet: communication belongs to a microbatch.
 5. The copies of all nodes are at most as many as `piper_ir.ground.limits` accepts: a graph holds each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper_compiler.directives.base import compute_nodes, directive, fail, site_field
from piper_compiler.directives.decided import Decided
from piper_ir.graph.graph import Graph, OverlapGroup
from piper_ir.graph.graph_parts import in_mbs
from piper_ir.ground.limits import MOST_NODES, most
from piper_ir.ground.select import Where


@directive
@dataclass(frozen=True)
class Split:
    """Add the coordinate mb: of the R rows of its replica, microbatch i of m gets the rows [i*R/m, (i+1)*R/m)."""

    selection: Where
    microbatches: int
    site: str = site_field()

    def check(self, graph: Graph) -> None:
        if type(self.microbatches) is not int or self.microbatches < 1:
            raise fail(
                self,
                1,
                f"microbatches is {self.microbatches!r}; an integer of at least 1 is needed",
            )
        if graph.microbatches:
            raise fail(
                self,
                2,
                f"the batch is split into {graph.microbatches} microbatches already; use one split",
            )
        if graph.roles:
            raise fail(self, 4, "nodes are placed already; write split before place")
        selected = compute_nodes(self, graph, self.selection)
        everything = sum(n.coords["op"] == "compute" for n in graph.sequence)
        if len(selected) != everything:
            raise fail(
                self,
                3,
                f"{len(selected)} of {everything} nodes are selected; use where() to select all",
            )
        if everything * self.microbatches > MOST_NODES:
            least = most(MOST_NODES, everything)
            raise fail(
                self,
                5,
                f"the graph has {everything} nodes in each microbatch; use at most {least} microbatches",
            )

    def decided(self) -> Decided | None:
        """Return its decisions before it is compiled."""
        return Decided(replace(self, microbatches=1), self.microbatches)

    def apply(self, graph: Graph) -> Graph:
        return split_all(graph, self.microbatches)


def split_all(graph: Graph, microbatches: int) -> Graph:
    """Return the graph with nodes that each stand for `microbatches` microbatches."""
    mbs = range(microbatches)
    edges = {
        ((a, mb), (b, mb)): applied
        for ((a, _), (b, _)), applied in graph.order_edges.items()
        for mb in mbs
    }
    overlaps = [
        OverlapGroup(
            tuple([tuple([(id, mb) for id, _ in member]) for member in group.members]),
            group.applied,
        )
        for group in graph.overlaps
        for mb in mbs
    ]
    families = {
        id: tuple([in_mbs(node, mbs) for node in family]) for id, family in graph.families.items()
    }
    return replace(
        graph,
        families=families,
        order_edges=edges,
        overlaps=tuple(overlaps),
        microbatches=microbatches,
    )
