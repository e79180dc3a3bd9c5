"""Define `shard`: let the devices of an axis share the work of each chunk (tensor, sequence and context parallelism).

    before  layer0.F@0 on ranks 0..1, each with all heads
    after   layer0.F@0 on ranks 0..1, each with half of the heads; inside of the step they add up what they have made

What is shared are indexes of the model: its heads, the hidden elements of its feed-forward parts. They are found in the
captured graph, and the parameters follow. With index="tokens" each device computes its tokens of every op; around
attention, which needs all of them, the devices exchange tokens for heads.

Legality
 1. It stands before every other directive, and selects all chunks.
 2. `over` is an axis of the mesh that no other directive uses.
 3. `stream` is "" or "tokens".
 4. The program is of a captured model: only its code can be rewritten.
 5. `attention` is "heads".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from piper_compiler.directives.base import Directive, directive, fail, site_field
from piper_compiler.directives.decided import Decided
from piper_ir.graph import Graph
from piper_ir.layout import Sharding
from piper_ir.mesh import AXES, Mesh
from piper_ir.select import Where

STREAMS = ("", "tokens")
TOKENS = "tokens"
ATTENTION = ("heads",)


@directive
@dataclass(frozen=True)
class Shard:
    """Share the work of each chunk among the devices along `over`.

    Attributes:
        over: the mesh axis.
        index: names of the indexes to share; all that can be shared where none is named.
        stream: "tokens" lets the devices share along its tokens what passes from layer to layer, too (sequence
            parallelism; Korthikanti et al., arXiv 2205.05198).
        keep: whether what the forward gathers for it is kept for the backward, and not gathered again.
        attention: how attention is computed where tokens are shared: "heads" exchanges tokens for heads around it
            (Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509).
        site: where the user wrote it.
    """

    selection: Where
    over: str = "tp"
    index: str | tuple[str, ...] = ()
    stream: str = ""
    keep: bool = False
    attention: str = "heads"
    site: str = site_field()

    def check(self, graph: Graph) -> None:
        if graph.log and not all(text.text.startswith("shard(") for text in graph.log):
            raise fail(self, 1, "another directive stands before it; write it first")
        if self.over not in AXES:
            raise fail(self, 2, f"over={self.over!r}; one of {', '.join(sorted(AXES))} is accepted")
        if self.stream not in STREAMS:
            raise fail(self, 3, f'stream={self.stream!r}; "" or "tokens" is accepted')
        if self.attention not in ATTENTION:
            raise fail(self, 5, f'attention={self.attention!r}; "heads" is accepted: a ring, or gathered keys, are not there yet')
        if graph.mesh.along(self.over) and not set(graph.mesh.along(self.over)) <= set(dict(graph.program.axes)):
            raise fail(self, 4, "the program has no code that could be rewritten; compile a job, not a program")

    def apply(self, graph: Graph) -> Graph:
        return graph

    def decided(self) -> Decided | None:
        """Return what it decides before it is compiled."""
        return Decided(self)


def shardings_of(directives: Iterable[Directive], mesh: Mesh) -> tuple[Sharding, ...]:
    """Return how devices are asked to share chunks, for the axes with more than one device."""
    asked = [d for d in directives if isinstance(d, Shard)]
    return tuple(
        Sharding(d.over, mesh.size(d.over), (), d.stream, d.keep, context=d.index in (TOKENS, (TOKENS,)))
        for d in asked
        if mesh.size(d.over) > 1
    )
