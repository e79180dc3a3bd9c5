"""Define `eager`: let torch run the operations of chunks one by one in a plan with kernels of Inductor.

    before  layer0.B  B in compiled groups of operations
    after   layer0.B  R, I and W, each operation by torch                               eager(where(layer=0))

Legality
 1. Chunks are selected whole: without phase and mb, since all microbatches run the code of a chunk, and without op.
 2. The program is of a captured model.
"""

from __future__ import annotations

from dataclasses import dataclass

from piper_compiler.directives.base import compute_nodes, directive, fail, site_field
from piper_compiler.directives.decided import Decided
from piper_ir.graph.graph import Graph
from piper_ir.ground.select import Where

PARTS = ("phase", "mb", "op")
"""The coordinates that select a part of a chunk's work."""


@directive
@dataclass(frozen=True)
class Eager:
    """Run the operations of the selected chunks by torch, whichever kernels the options choose for the others."""

    selection: Where
    site: str = site_field()

    def check(self, graph: Graph) -> None:
        parts = [name for name, _ in self.selection.terms if name in PARTS]
        if parts:
            raise fail(self, 1, f"chunks are selected whole; leave {', '.join(parts)} out of where")
        if graph.program.source != "captured":
            raise fail(self, 2, "the program is no captured model, so it has no operations to run")
        compute_nodes(self, graph, self.selection)

    def decided(self) -> Decided | None:
        """Return its decisions before it is compiled: none."""
        return Decided()

    def apply(self, graph: Graph) -> Graph:
        edit = graph.edit()
        chunks = [str(n.coords["chunk"]) for n in compute_nodes(self, graph, self.selection)]
        edit.eager = tuple(dict.fromkeys((*graph.eager, *chunks)))
        return edit.done()
