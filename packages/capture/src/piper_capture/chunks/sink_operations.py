"""Move operations that stand between layers into the layer that reads them, if fewer bytes cross then.

In `x = layer(x) + 0.5 * x` the product follows on the layer before, which made x, and would be sent beside x to the
next one. The next layer reads x anyway; with the product there, x alone is sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf, prod

from torch import fx

from piper_capture.chunks.replay import ROWS, ReplayFacts
from piper_capture.values.concrete import concrete_shape, tensors_of


class Sinking:
    """Record the number of the region of each operation; `movable` operations may move to a later region."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        home: Mapping[fx.Node, int],
        movable: Collection[fx.Node],
        facts: ReplayFacts,
    ) -> None:
        self.home = dict(home)
        self._facts = facts
        self._position = {n: i for i, n in enumerate(nodes)}
        self._last_write: dict[int, int] = {}
        for node in nodes:
            self._last_write.update(dict.fromkeys(facts.writes[node], self._position[node]))
        self._movable = {n for n in movable if not self._must_stay(n)}

    def into(self, region: int, inside: Collection[fx.Node], starts: int) -> None:
        """Move operations into a region.

        `inside` are its own operations. `starts` is the position of the first operation of its layer: an operation
        before it that draws random numbers draws them in the state of the layer before.
        """
        moved: set[fx.Node] = set()
        own = set(inside)
        for node in self._first_read_in(region, own, starts):
            more = self._with_users(node, region, own | moved)
            if node not in moved and self._bytes_into(own | moved | more) < self._bytes_into(
                own | moved
            ):
                moved |= more
        self.home.update(dict.fromkeys(moved, region))

    def _must_stay(self, node: fx.Node) -> bool:
        """Return whether the operation writes, or would read something else at a later place."""
        read = [s for n in node.all_input_nodes for s in self._facts.storages.get(n, ())]
        return bool(self._facts.writes[node]) or any(
            self._last_write.get(s, -1) > self._position[node] for s in read
        )

    def _first_read_in(self, region: int, own: set[fx.Node], starts: int) -> list[fx.Node]:
        """Return the movable operations that no earlier region reads, except for each other; the last one first."""
        first_read: set[fx.Node] = set()
        todo = list(self._inputs(own))
        while todo:
            node = todo.pop()
            early = node in self._facts.random and self._position[node] < starts
            if (
                node in self._movable
                and not early
                and all(u in own or u in first_read for u in self._users(node, region))
            ):
                first_read.add(node)
                todo += (n for n in node.all_input_nodes if n in self.home and n not in own)
        return sorted(first_read, key=self._position.__getitem__, reverse=True)

    def _with_users(self, node: fx.Node, region: int, there: set[fx.Node]) -> set[fx.Node]:
        """Return the operation and the operations that must move with it: they read it, directly or not."""
        more, todo = {node}, [node]
        while todo:
            new = [u for u in self._users(todo.pop(), region) if u not in there and u not in more]
            more.update(new)
            todo += new
        return more

    def _users(self, node: fx.Node, region: int) -> list[fx.Node]:
        """Return the operations up to this region that read the node's tensor."""
        return [u for u in node.users if self.home.get(u, inf) <= region]

    def _bytes_into(self, nodes: set[fx.Node]) -> float:
        return sum(_bytes(n) for n in self._inputs(nodes))

    def _inputs(self, nodes: Collection[fx.Node]) -> set[fx.Node]:
        return {i for n in nodes for i in n.all_input_nodes if i in self.home and i not in nodes}


def _bytes(node: fx.Node) -> float:
    """Return the bytes of the tensor at a few rows; an operation with several tensors cannot be sent by itself."""
    if isinstance(node.meta["example_value"], tuple | list):
        return inf
    return sum(t.dtype.itemsize * prod(concrete_shape(t, ROWS, node)) for t in tensors_of(node))
