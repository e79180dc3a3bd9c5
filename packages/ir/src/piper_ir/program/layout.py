"""Describe the placement of tensors on the devices of an axis that share the work of a chunk.

The shapes in a program are the shapes on one device. Along each axis a tensor is sharded (`DimPart`), a partial sum, or
replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import Where
from piper_ir.ground.sizes import Dim, bind


@dataclass(frozen=True, slots=True)
class DimPart:
    """Say that a tensor is sharded along an axis.

    The dimension is [outer, n, rest] over all n devices of the axis, and the device at place k has [outer, k, rest]. So
    outer is 1 if the parts are blocks one behind the other, and 3 for the heads of a weight that makes queries, keys
    and values at once.

    Attributes:
        axis: the mesh axis.
        dim: the dimension of the tensor.
        outer: the number of outer steps in that dimension.
    """

    axis: str
    dim: int
    outer: int = 1


EXPERTS = "experts"
"""The name of the index of a mixture's experts, and of the coordinate of the regions that compute them."""
SHARED = "shared"
"""The coordinate of the chunks that devices share, while each computes all other chunks whole."""
TOKENS = "tokens"
"""The stream of an axis whose devices share the tokens of a row between layers; the index of context parallelism."""
ROWS = "rows"
"""The stream of an axis whose devices each have rows of their own, and trade them for the rows of their experts."""
EXPERTS_SHARED = 'shard(where(experts=ANY), over="ep", index="experts", stream="rows")'
"""The directive by which devices share experts, as a user writes it."""
BOUND = 1.25
"""The places that a device of a dropless mixture has for rows of another one, over their mean."""
OVERFLOWS = ("rounds", "error", "drop")
"""The names of the ways to treat more rows than that; the first is the default."""

Layout = tuple[DimPart, ...]
"""The sharding of a tensor: each entry applies to the shard that the entries before it have left."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """Ask that the devices of an axis share the work of a model.

    Attributes:
        over: the mesh axis.
        degree: the number of its devices.
        index: names of the indexes that they share; all that can be shared if none is named.
        stream: "tokens" if activations between layers are also sharded along their tokens; "rows" if each device has
            rows of its own and some experts of the selected chunks; else "".
        keep: whether tensors that the forward gathers are kept for the backward, and not gathered again.
        split: the degrees of the axes into which this one is split, if no index has enough steps for all devices.
        context: whether they share the tokens of all ops (context parallelism).
        attention: how they compute attention then, which needs the keys of all tokens: "heads", "ring" or "gather".
        order: which tokens a device has then: "blocks", or the two of "zigzag", r and 2 n - 1 - r of 2 n blocks; ""
            before it is chosen.
        selection: the chunks that they share; all if it is None.
        bound: of dropless mixtures, the places for rows of another device over the mean of these.
        overflow: how more rows are treated: "rounds", "error" or "drop".
        pieces: the number of pieces of a product whose messages run beside the products of other pieces; 1 for none.
        cut: whether chunks are cut where devices begin and end to share work, so that sums are made between them.
        folded: the axes, outermost first, of which `over` is made, with their sizes; none if it is one axis.
        hidden: the axes, outermost first, whose devices cut each expert, with their sizes; none if experts are whole.
    """

    over: str
    degree: int
    index: tuple[str, ...] = ()
    stream: str = ""
    keep: bool = False
    split: tuple[int, ...] = ()
    context: bool = False
    attention: str = field(default="heads", repr=False)
    order: str = field(default="", repr=False)
    selection: Where | None = field(default=None, repr=False)
    bound: float = field(default=BOUND, repr=False)
    overflow: str = field(default=OVERFLOWS[0], repr=False)
    pieces: int = field(default=1, repr=False)
    cut: bool = field(default=False, repr=False)
    folded: tuple[tuple[str, int], ...] = field(default=(), repr=False)
    hidden: tuple[tuple[str, int], ...] = field(default=(), repr=False)

    @property
    def way(self) -> str:
        """Return how attention is computed, of which tokens, and in how many pieces products are, as a text.

        It is "" for heads, blocks and products that are in one piece.
        """
        order = self.order if self.order == "zigzag" else ""
        way = f"{self.attention} {order}".strip() if order or self.attention != "heads" else ""
        return way if self.pieces == 1 else f"{way} {self.pieces} pieces".strip()

    @property
    def experts(self) -> bool:
        """Return whether they share experts, and rows everywhere else."""
        return self.stream == ROWS

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Return the axis, or the axes that it is made of or split into, with their sizes."""
        if self.folded:
            return self.folded
        if len(self.split) < 2:
            return ((self.over, self.degree),)
        return tuple((f"{self.over}.{k}", degree) for k, degree in enumerate(self.split))


@dataclass(frozen=True, slots=True)
class StepCollective:
    """Describe a collective that the devices of an axis run inside of a step.

    Attributes:
        kind: a kind of `piper_ir.program.collectives`.
        axis: the mesh axis.
        nbytes: the bytes of the whole tensor, as `piper_ir.program.collectives` counts a message; 0 if only a run knows
            whether there is one.
        why: the op that asks for it, with the user's line if it is known.
        mean_nbytes: for one of each further round of experts, the bytes of as many rows as a device has on average; it
            sends the rows without a place. 0 for any other collective.
    """

    kind: str
    axis: str
    nbytes: Dim
    why: str = ""
    mean_nbytes: Dim = 0

    @property
    def further(self) -> bool:
        """Return whether it runs once in each further round of experts; a plan knows not how many there are."""
        return self.mean_nbytes != 0

    def bind(self, rows: int) -> StepCollective:
        """Return the collective at a number of rows."""
        return StepCollective(
            self.kind, self.axis, bind(self.nbytes, rows), self.why, bind(self.mean_nbytes, rows)
        )


def whole_shape(
    shape: Sequence[Dim], layout: Layout, degrees: Mapping[str, int]
) -> tuple[Dim, ...]:
    """Return the shape of a tensor over all devices, given the shape of one device's shard."""
    sizes = list(shape)
    for part in layout:
        sizes[part.dim] = sizes[part.dim] * degrees[part.axis]
    return tuple(sizes)


def places(layout: Layout, mesh: Mesh, rank: int) -> tuple[tuple[DimPart, int, int], ...]:
    """Return the entries of a layout, each with the number of devices and the rank's place among them."""
    return tuple(
        (part, mesh.size(part.axis), mesh.index_along((part.axis,), rank)) for part in layout
    )
