"""Directives on the graph of one microbatch, for as long as they treat all microbatches alike.

After `split`, a directive whose selection does not name microbatches does the same to each of them. So it is applied to the graph
of one, and `Uniform.expand` makes the graph that applying it to all would have made, node for node and in the same order. An
`order` between single microbatches is kept as pairs. What fits neither way (a directive of the user's, a selection of some
microbatches) is applied to the expanded graph; so is everything when a directive fails, for the message is about that graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from piper_compiler.directives import Directive, order, partition, place, replicate, split_backward
from piper_compiler.directives.order import has_no_such_phase
from piper_compiler.directives.place import role_name
from piper_ir.graph import Coord, Graph, GraphValue, Node
from piper_ir.ops import COMM, Recv, Send
from piper_ir.select import Where

Edge = tuple[tuple[str, int], tuple[str, int]]
"""An order between two nodes, each by its id in the graph of one microbatch and its microbatch."""


class NotUniform(Exception):
    """The directive has to see all microbatches."""


@dataclass
class Uniform:
    """`one`: the graph of one microbatch; `microbatches`: how many there are. `transfers`: groups of communication nodes; in the
    whole graph a group stands microbatch after microbatch. `edges`: the orders, with the index of the directive in the log."""

    one: Graph
    microbatches: int
    transfers: list[list[str]] = field(default_factory=list)
    edges: dict[Edge, int] = field(default_factory=dict)
    _known: dict[tuple[object, ...], list[tuple[str, str]]] = field(default_factory=dict)

    def apply(self, item: Directive) -> None:
        """Check and apply a directive; the log is the caller's. NotUniform when it cannot be done here, before any change."""
        if isinstance(item, order):
            self._order(item)
            return
        if not isinstance(item, partition | place | replicate | split_backward) or _names_microbatches(item):
            raise NotUniform
        if isinstance(item, split_backward) and self.edges:
            raise NotUniform  # what is ordered is not split any more, which it sees in the whole graph
        known = len(self.one.nodes)
        self._known.clear()
        item.check(self.one)
        self.one = item.apply(self.one)
        if isinstance(item, place):
            made = [self.one.nodes[id] for id in list(self.one.nodes)[known:]]
            role = role_name(dict(item.on))
            for forward in (True, False):  # nodes are connected in this order, and within it by microbatch
                self.transfers.append([n.id for n in made if _is_forward(self.one, n, role) is forward])

    def _order(self, item: order) -> None:
        """What `order` checks and does. What is not legal is left to it."""
        if item.overlaps:
            raise NotUniform
        last: dict[str, tuple[str, int]] = {}
        seen: set[tuple[str, int]] = set()
        pairs: list[Edge] = []
        shared, found = False, 0
        for selection in item.selections:
            mb, nodes = self._selected(selection, item.missing == "skip")
            found += bool(nodes)
            shared = shared or any(role in last for _, role in nodes)
            for id, role in nodes:
                node = id, mb
                seen.add(node)
                if role in last:
                    pairs.append((last[role], node))
                last[role] = node
        unplaced = self.one.roles and "" in last
        if len(item.selections) < 2 or (found > 1 and not shared) or unplaced or len(seen) < len(pairs) + len(last):
            raise NotUniform
        applied = len(self.one.log)
        for pair in pairs:
            self.edges.setdefault(pair, applied)

    def _selected(self, selection: Where, skip: bool) -> tuple[int, list[tuple[str, str]]]:
        """The microbatch of a selection of a single one, and its nodes with their roles. `skip`: there may be none."""
        mb: object = None
        others = []
        for term in selection.terms:
            if term[0] == "mb":
                mb = term[1]
            else:
                others.append(term)
        rest = tuple(others)
        if type(mb) is not int or not 0 <= mb < self.microbatches:
            raise NotUniform
        if rest not in self._known:
            found = self.one.matching(Where(rest))
            nothing = not found and not (skip and has_no_such_phase(self.one, Where(rest)))
            if nothing or any(name == "op" for name, _ in rest):
                raise NotUniform
            self._known[rest] = [(n.id, n.role) for n in sorted(found, key=self.one.position)]
        if not self._known[rest] and not skip:
            raise NotUniform  # an earlier order was allowed to miss it
        return mb, self._known[rest]

    def expand(self) -> Graph:
        """The graph of all microbatches."""
        return _Expansion(self).graph()

    def first(self) -> Graph:
        """The graph of microbatch 0 alone, without orders between microbatches."""
        return _Expansion(replace(self, microbatches=1, edges={})).graph()


def _names_microbatches(item: partition | place | replicate | split_backward) -> bool:
    return not isinstance(item, partition) and any(name == "mb" for name, _ in item.selection.terms)


def _is_forward(graph: Graph, transfer: Node, placed: str) -> bool:
    """Whether a transfer was made when a forward node was placed on the role `placed`: one that reads what arrives there, or that
    writes what is sent from there."""
    if isinstance(transfer.op, Send):
        transfer = graph.nodes[f"recv.{transfer.id.removeprefix('send.')}"]
    (copy,) = transfer.writes
    (value,) = graph.nodes[f"send.{copy}"].reads
    cause = graph.readers[copy][0] if transfer.role == placed else graph.writer[value]
    return graph.nodes[cause].coords["phase"] == "F"


class _Expansion:
    """The tables of the graph of all microbatches. `values`, `nodes`: id in the graph of one -> its ids by microbatch."""

    def __init__(self, uniform: Uniform) -> None:
        self.uniform, self.one, self.count = uniform, uniform.one, uniform.microbatches
        self.suffixes = [f"@{mb}" for mb in range(self.count)]
        self.copies = {v for n in self.one.nodes.values() if isinstance(n.op, Recv) for v in n.writes}
        self.values = {v: self._ids(v, v in self.copies) for v in self.one.values}
        self.nodes = {n.id: self._ids(n.id, isinstance(n.op, COMM)) for n in self.one.nodes.values()}

    def _ids(self, id: str, copied: bool) -> list[str]:
        """Copies and their transfers end in the role that they go to, "#pp1", which stays at the end."""
        head, sharp, role = id.rpartition("#") if copied else (id, "", "")
        return [f"{head}{suffix}{sharp}{role}" for suffix in self.suffixes]

    def graph(self) -> Graph:
        order_edges = {(self.nodes[a][i], self.nodes[b][j]): applied for ((a, i), (b, j)), applied in self.uniform.edges.items()}
        return replace(
            self.one,
            nodes=self._all_nodes(),
            values=self._all_values(),
            writer={v: n for value, node in self.one.writer.items() for v, n in self._both(value, node)},
            readers=self._all_readers(),
            order_edges=order_edges,
            microbatches=self.count,
            index=self._index(),
            _sets={},
            _selected={},
        )

    def _both(self, value: str, node: str) -> zip[tuple[str, str]]:
        return zip(self.values[value], self.nodes[node], strict=True)

    def _all_values(self) -> dict[str, GraphValue]:
        out: dict[str, GraphValue] = {}
        for v, held in self.one.values.items():
            if v not in self.copies:
                out.update(dict.fromkeys(self.values[v], held))
        for group in self.uniform.transfers:
            received = [v for id in group for v in self.one.nodes[id].writes]
            for mb in range(self.count):
                out.update({self.values[v][mb]: self.one.values[v] for v in received})
        return out

    def _all_readers(self) -> dict[str, tuple[str, ...]]:
        out: dict[str, tuple[str, ...]] = {}
        for value, readers in self.one.readers.items():
            out.update(zip(self.values[value], self._columns(readers, self.nodes), strict=True))
        return out

    def _columns(self, ids: Sequence[str], names: Mapping[str, Sequence[str]]) -> Sequence[tuple[str, ...]]:
        """By microbatch, the names of some ids."""
        return list(zip(*[names[id] for id in ids], strict=True)) if ids else [()] * self.count

    def _copies_of(self, node: Node) -> list[Node]:
        coords, op, role, stream = node.coords, node.op, node.role, node.stream
        reads, writes = self._columns(node.reads, self.values), self._columns(node.writes, self.values)
        return [
            Node(id, op, {**coords, "mb": mb}, read, written, role, stream)
            for mb, (id, read, written) in enumerate(zip(self.nodes[node.id], reads, writes, strict=True))
        ]

    def _all_nodes(self) -> dict[str, Node]:
        made = {n.id: self._copies_of(n) for n in self.one.nodes.values()}
        out: dict[str, Node] = {}
        for node in self.one.nodes.values():
            if not isinstance(node.op, COMM):
                out.update(zip(self.nodes[node.id], made[node.id], strict=True))
        for group in self.uniform.transfers:
            for mb in range(self.count):
                out.update({self.nodes[id][mb]: made[id][mb] for id in group})
        return out

    def _index(self) -> dict[tuple[str, Coord], tuple[str, ...]]:
        """As an editor makes it: compute by all of its coordinates, the rest by its `op`."""
        out: dict[tuple[str, Coord], list[str]] = {}
        for node in self.one.nodes.values():
            if isinstance(node.op, COMM):
                continue
            ids = self.nodes[node.id]
            compute = node.coords.get("op") == "compute"
            for key in node.coords.items() if compute else [("op", node.coords["op"])]:
                out.setdefault(key, []).extend(ids)
            for mb, id in enumerate(ids if compute else ()):
                out.setdefault(("mb", mb), []).append(id)
        for group in self.uniform.transfers:
            for mb in range(self.count):
                for id in group:
                    out.setdefault(("op", self.one.nodes[id].coords["op"]), []).append(self.nodes[id][mb])
        return {key: tuple(ids) for key, ids in out.items()}
