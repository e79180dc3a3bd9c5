"""Put the activations between experts and the rest of a model into the layout that devices exchange.

A value that experts take has a dimension of experts and one of rows. At home, where a device has its own rows, it is
written with the experts first, [E, rows, ...]: n equal blocks, block k for the experts of device k. An all-to-all turns
that into the input of the experts' chunk: again n blocks, block j with the rows of device j. Inside of that chunk it is
[n x rows, E / n, ...] in the value's own order of dimensions, as if one device had all of these rows. The outputs of
experts go back in the same way.

The forms differ from the value's own by views and a copy, which are added to the forward functions of chunks. So
autograd makes their backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from piper_ir.ground.sizes import TensorSpec


@dataclass(frozen=True)
class Dispatched:
    """Name the dimension of experts and the dimension of rows of a value."""

    experts: int
    rows: int

    def form(self, shape: Sequence[int], degree: int) -> tuple[int, ...]:
        """Return the shape in the form for exchange, given the shape of a value with the rows of `degree` devices.

        It is [degree x experts, ...], with the rows of one device.
        """
        sizes = list(shape)
        sizes[self.rows] //= degree
        experts = sizes.pop(self.experts)
        return (degree * experts, *sizes)

    def spec(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of a value in the form for exchange at home; its sizes may depend on rows."""
        sizes = list(spec.shape)
        experts = sizes.pop(self.experts)
        return TensorSpec((experts, *sizes), spec.dtype)

    @property
    def _rows_behind(self) -> int:
        """Return the place of rows among the dimensions other than experts, which goes first."""
        return self.rows - (self.rows > self.experts)

    def taken(self, graph: fx.Graph, node: fx.Node, shape: Sequence[int], degree: int) -> fx.Node:
        """Add the ops that turn the form for exchange into the value, of this shape; return the result."""
        if degree > 1:
            (experts, *rest), at = self.form(shape, 1), self._rows_behind
            split = (*rest[:at], rest[at] // degree, *rest[at + 1 :])
            node = graph.call_method("view", (node, degree, experts, *split))
            order = (1, *range(2, 2 + at), 0, *range(2 + at, 2 + len(rest)))
            node = graph.call_method("permute", (node, *order))
            node = graph.call_method("reshape", (node, experts, *rest))
        return node if not self.experts else graph.call_method("movedim", (node, 0, self.experts))

    def given(self, graph: fx.Graph, node: fx.Node, shape: Sequence[int], degree: int) -> fx.Node:
        """Add the ops that turn the value, of this shape, into the form for exchange; return the result."""
        if self.experts:
            node = graph.call_method("movedim", (node, self.experts, 0))
        if degree > 1:
            (experts, *rest), at = self.form(shape, 1), self._rows_behind
            split = (*rest[:at], degree, rest[at] // degree, *rest[at + 1 :])
            node = graph.call_method("reshape", (node, experts, *split))
            order = (1 + at, 0, *range(1, 1 + at), *range(2 + at, 2 + len(rest)))
            node = graph.call_method("permute", (node, *order))
            node = graph.call_method("reshape", (node, *self.form(shape, degree)))
        return node


@dataclass(frozen=True)
class Dispatch:
    """Say which values of a chunk are exchanged.

    Attributes:
        inputs: for each input of the chunk how it is exchanged; None if it is not.
        outputs: for each output how it is exchanged; None if it is not.
        degree: the number of devices whose rows it computes: more than one for a chunk of experts.
    """

    inputs: tuple[Dispatched | None, ...]
    outputs: tuple[Dispatched | None, ...]
    degree: int = 1

    @property
    def exchanged(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the inputs and the outputs that are exchanged."""
        incoming, outgoing = (
            (k for k, how in enumerate(each) if how is not None)
            for each in (self.inputs, self.outputs)
        )
        return tuple(incoming), tuple(outgoing)

    @property
    def changes(self) -> bool:
        """Return whether it changes the chunk's function."""
        return self.degree > 1 or any(self.inputs) or any(self.outputs)

    def take(
        self, graph: fx.Graph, given: Sequence[fx.Node], shapes: Sequence[Sequence[int]]
    ) -> list[fx.Node]:
        """Return the nodes of a chunk's inputs as it uses them; `shapes` are the shapes outside of the form."""
        taken = zip(given, self.inputs, shapes, strict=True)
        return [
            node if how is None else how.taken(graph, node, shape, self.degree)
            for node, how, shape in taken
        ]

    def give(
        self, graph: fx.Graph, made: Mapping[int, fx.Node], shapes: Sequence[Sequence[int]]
    ) -> dict[int, fx.Node]:
        """Return the nodes of a chunk's outputs, by place, in the form for exchange.

        `made` has no outputs that are inputs changed in place; `shapes` are the shapes of the others outside of it.
        """
        given = {}
        for (place, node), shape in zip(made.items(), shapes, strict=True):
            how = self.outputs[place]
            given[place] = node if how is None else how.given(graph, node, shape, self.degree)
        return given
