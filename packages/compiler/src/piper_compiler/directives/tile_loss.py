"""Define `tile_loss`: compute the last linear layer, the loss and their gradients tile by tile.

    before  root.1.F  logits of all tokens, then the loss
    after   root.1.F  for each of 8 tiles of the tokens: logits, loss, gradients                     tile_loss(8)

Legality
 1. tiles is an integer of at least 1; with 1 nothing changes.
 2. It stands once.
 3. The program is of a captured model. Its loss is torch's cross_entropy, as a sum or a mean, of a linear layer's
    output, with element-wise operations between them at most, and no other use of the logits.
 4. The tiles divide the tokens of a row on each device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper_compiler.directives.base import directive, fail, site_field
from piper_compiler.directives.decided import Decided
from piper_compiler.directives.prepare import CaptureRequest, Preparation
from piper_ir.graph.graph import Graph


@directive
@dataclass(frozen=True)
class TileLoss:
    """Compute logits and loss in `tiles` tiles of the tokens, so that the logits of one tile are alive at once.

    The forward makes the gradients, too, which wait for the backward in place of the logits.
    """

    tiles: int
    site: str = site_field()

    def _check_form(self) -> None:
        if type(self.tiles) is not int or self.tiles < 1:
            raise fail(
                self, 1, f"tiles={self.tiles!r}; the number of tiles is an integer of at least 1"
            )

    def prepare(self, request: CaptureRequest, seen: Preparation) -> CaptureRequest:
        """Ask for a capture whose loss is computed in tiles."""
        self._check_form()
        if any(isinstance(item, TileLoss) for item in seen.before):
            raise fail(self, 2, "the loss is in tiles already; keep one tile_loss")
        return replace(request, tiles=self.tiles)

    def check(self, graph: Graph) -> None:
        self._check_form()
        if graph.program.source != "captured":
            raise fail(self, 3, "the program is no captured model, so it has no loss to compute")

    def decided(self) -> Decided | None:
        """Return its decisions before it is compiled."""
        return Decided()

    def simplest(self) -> TileLoss | None:
        """Return None where there is one tile, which is the loss as it is."""
        return self if self.tiles > 1 else None

    def apply(self, graph: Graph) -> Graph:
        return graph
