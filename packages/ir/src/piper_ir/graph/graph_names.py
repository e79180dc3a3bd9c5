"""Show a graph by the names of its nodes and values in each microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from piper_ir.graph.graph_parts import At, GraphValue, Node
from piper_ir.ground.node_ids import named


class NamedNodes:
    """Give a Graph's nodes and values their names.

    That takes time in the number of microbatches, so only code that shows or writes a graph node by node uses it.
    """

    families: Mapping[str, tuple[Node, ...]]
    values: Mapping[str, GraphValue]
    writers: Mapping[str, tuple[str, ...]]

    @cached_property
    def sequence(self) -> tuple[Node, ...]:
        """Return all nodes in the order in which they were made."""
        every = [node for family in self.families.values() for node in family]
        return tuple(sorted(every, key=lambda node: (node.made, node.each[0])))

    def at(self, place: At) -> Node | None:
        """Return the node of an id that stands for a microbatch."""
        return next(
            (node for node in self.families.get(place[0], ()) if place[1] in node.each), None
        )

    def reads_at(self, node: Node, mb: int) -> list[At]:
        """Return the values that a node reads in a microbatch; `Node` describes a node of the whole step."""
        if mb >= 0:
            return [(v, mb) for v in node.reads]
        values: list[At] = []
        for v in node.reads:
            own_writers = [
                n
                for id in self.writers.get(v, ())
                for n in self.families[id]
                if n.mbs is not None and n.role == node.role
            ]
            values += (
                [(v, k) for k in sorted(k for n in own_writers for k in n.each)]
                if own_writers
                else [(v, -1)]
            )
        return values

    def name(self, at: At) -> str:
        """Return the name of a node in a microbatch."""
        node = self.at(at)
        return at[0] if node is None else node.name(at[1])

    def names(self, values: Iterable[At]) -> tuple[str, ...]:
        """Return the names of values in microbatches."""
        return tuple(
            [named(v, self.values[v].tail if v in self.values else "", mb) for v, mb in values]
        )

    def copies(self, nodes: Iterable[Node]) -> list[Node]:
        """Return a node per microbatch for the given nodes, with its name there and `mb` among its coordinates."""
        named_nodes = []
        for n in nodes:
            for mb in n.each:
                coords = n.coords if mb < 0 else {**n.coords, "mb": mb}
                writes = self.names([(v, mb) for v in n.writes])
                named_nodes.append(
                    Node(
                        n.name(mb),
                        n.op,
                        coords,
                        self.names(self.reads_at(n, mb)),
                        writes,
                        n.role,
                        n.stream,
                    )
                )
        return named_nodes

    @cached_property
    def nodes(self) -> Mapping[str, Node]:
        """Return every node in every microbatch by its name there; the mapping is made on first use."""
        return {node.id: node for node in self.copies(self.sequence)}

    @cached_property
    def places(self) -> Mapping[str, At]:
        """Return for each name in `nodes` the id and microbatch."""
        return {n.name(mb): (n.id, mb) for n in self.sequence for mb in n.each}

    @property
    def writer(self) -> Mapping[str, str]:
        """Return for each value the node that writes it, both by their names in `nodes`."""
        return {v: node.id for node in self.nodes.values() for v in node.writes}

    @property
    def readers(self) -> Mapping[str, tuple[str, ...]]:
        """Return for each value the nodes that read it, all by their names in `nodes`."""
        ids_by_value: dict[str, dict[str, None]] = {}
        for node in self.nodes.values():
            for v in node.reads:
                ids_by_value.setdefault(v, {})[node.id] = None
        return {v: tuple(ids) for v, ids in ids_by_value.items()}
