"""Select a graph's nodes, their microbatches and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar, cast

from piper_ir.graph.graph_parts import At, Coord, Mbs, Node, common, in_mbs, mbs_of
from piper_ir.ground.errors import SelectorError
from piper_ir.ground.select import ANY, NONE, Match, Where
from piper_ir.program.ops import Add

T = TypeVar("T")
Terms = tuple[tuple[str, Match], ...]


class Selecting:
    """Select from a Graph.

    Attributes:
        families: id -> its nodes.
        index: coordinate and value -> the ids that have it.
        chunk_index: chunk -> its position along the program.
    """

    families: Mapping[str, tuple[Node, ...]]
    index: Mapping[tuple[str, Coord], tuple[str, ...]]
    chunk_index: Mapping[str, int]
    microbatches: int
    _found: dict[Terms, list[Node]]
    _kept: dict[int, tuple[object, object]]
    _alike: dict[Terms, list[tuple[str, str, Sequence[str]]]]

    def copies(self, nodes: Iterable[Node]) -> list[Node]:
        """Return a node per microbatch for the given nodes, under their names there."""
        raise NotImplementedError

    def coordinates(self) -> dict[str, list[Coord]]:
        """Return every coordinate with its values, sorted, for messages about selectors."""
        values_by_name: dict[str, set[Coord]] = (
            {"mb": set(range(self.microbatches))} if self.microbatches else {}
        )
        for name, value in self.index:
            values_by_name.setdefault(name, set()).add(value)
        return {
            n: sorted(vs, key=lambda v: (isinstance(v, str), v))
            for n, vs in sorted(values_by_name.items())
        }

    def find(self, selection: Where) -> list[Node]:
        """Return the selected nodes along the step, each in its selected microbatches; none is no error.

        Communication is found only when `op` asks for it.
        """
        wanted, rest = _by_mb(selection)
        matching = self._found.get(rest)
        if matching is None:
            matching = self._found[rest] = sorted(self._matching(dict(rest)), key=self.along)
        if wanted is None:
            return list(matching)
        return [
            node if mbs is node.mbs else in_mbs(node, mbs)
            for node in matching
            for mbs in _selected(node, wanted)
        ]

    def pick(self, selection: Where) -> list[Node]:
        """Return the same as `find`; raise SelectorError when nothing matches."""
        nodes = self.find(selection)
        if not nodes:
            raise SelectorError(
                f"{selection} matches no node. {self._what_exists(_with_op(selection.terms))}"
            )
        return nodes

    def kept(self, owner: object, make: Callable[[], T]) -> T:
        """Return the result of `make`, which is computed once for each owner.

        So `apply` of a directive can use the result that its `check` has computed.
        """
        entry = self._kept.get(id(owner))
        if entry is None:
            entry = self._kept[id(owner)] = owner, make()
        return cast(T, entry[1])

    def turns(self, selection: Where) -> list[tuple[Node, int]]:
        """Return the selected nodes microbatch by microbatch, in topological order.

        Forward comes before backward; within these the order goes by microbatch, then along the program (backward:
        against it).
        """
        pairs = [(node, mb) for node in self.find(selection) for mb in node.each]
        return sorted(pairs, key=lambda at: (_rank(at[0]), at[1], self.along(at[0])))

    def chains(self, selections: Iterable[Where]) -> list[Mapping[str, tuple[At, ...]]]:
        """Return for each selection, by role, the selected nodes there in the order of `turns`.

        An order asks for very many selections, and most differ in their microbatch alone.
        """
        known, every = self._alike, range(self.microbatches)
        role_chains: list[Mapping[str, tuple[At, ...]]] = []
        for selection in selections:
            terms = selection.terms
            mb: Match = -1
            for k, (name, value) in enumerate(terms):
                if name == "mb":
                    mb, terms = value, terms[:k] + terms[k + 1 :]
                    break
            alike = known.get(terms)
            if alike is None:
                alike = known[terms] = self._roles(self.find(Where.of(terms)))
            if alike and type(mb) is int and mb in every:
                role_chains.append(
                    {
                        role: tuple([(id, mb) for id in ids]) if ids else ((id, mb),)
                        for role, id, ids in alike
                    }
                )
            else:
                role_chains.append(self._by_role(selection))
        return role_chains

    def _by_role(self, selection: Where) -> Mapping[str, tuple[At, ...]]:
        nodes_by_role: dict[str, list[At]] = {}
        for node, mb in self.turns(selection):
            nodes_by_role.setdefault(node.role, []).append((node.id, mb))
        return {role: tuple(nodes) for role, nodes in nodes_by_role.items()}

    def _roles(self, nodes: list[Node]) -> list[tuple[str, str, Sequence[str]]]:
        """Return each role with its first id, and all of its ids if it has several.

        Nothing is returned unless all nodes stand for all microbatches.
        """
        every = range(self.microbatches)
        ids_by_role: dict[str, list[str]] = {}
        for node in nodes:
            if node.mbs != every:
                return []
            ids_by_role.setdefault(node.role, []).append(node.id)
        return [(role, ids[0], ids if len(ids) > 1 else ()) for role, ids in ids_by_role.items()]

    def select(self, selection: Where) -> list[Node]:
        """Return the selected nodes by their names in each microbatch, in topological order.

        Raises SelectorError when nothing matches.
        """
        return sorted(self.copies(self.pick(selection)), key=self.position)

    def _matching(self, terms: dict[str, Match]) -> list[Node]:
        indexed = (
            {n: w for n, w in terms.items() if w not in (ANY, NONE)}
            if terms["op"] == "compute"
            else {"op": terms["op"]}
        )
        rest = Where(tuple(terms.items()))
        candidates = [node for id in self._candidates(indexed) for node in self.families[id]]
        return [node for node in candidates if rest.matches(node.coords)]

    def _candidates(self, terms: Mapping[str, Match]) -> Iterable[str]:
        """Return the ids that have the wanted values of all terms, in the time of the shortest list."""
        id_sets: list[frozenset[str]] = []
        for name, wanted in terms.items():
            if wanted not in (ANY, NONE):
                keys = wanted if isinstance(wanted, tuple) else (wanted,)
                id_sets.append(frozenset(id for k in keys for id in self.index.get((name, k), ())))
        if not id_sets:
            return self.families
        id_sets.sort(key=len)
        return id_sets[0].intersection(*id_sets[1:])

    def _what_exists(self, terms: Mapping[str, object]) -> str:
        there = self.coordinates()
        unknown = [t for t in terms if t not in there]
        if unknown:
            return f"There is no coordinate {unknown[0]!r}; there are {', '.join(there)}."
        shown = [f"{n} in {_span(there[n])}" for n in terms if n != "op"]
        return (
            "There are nodes with " + ", ".join(shown) + "."
            if shown
            else "The graph has no such node."
        )

    def along(self, node: Node) -> tuple[int, int, str]:
        """Return a sort key along the step, whatever the microbatch."""
        rank = _rank(node)
        chunk = self.chunk_index.get(str(node.coords.get("chunk", "")), 0)
        after = 0 if isinstance(node.op, Add) or node.coords.get("phase") == "R" else 1
        return rank, (chunk if rank == 0 else -chunk) * 2 + after, node.id

    def position(self, node: Node) -> tuple[int, int, int, str]:
        """Return a sort key that is a topological order of any set of compute nodes of single microbatches."""
        rank, place, id = self.along(node)
        return rank, node.mb, place, id


_RANKS = {"F": 0, "R": 1, "B": 1, "I": 1, "W": 2}


def _rank(node: Node) -> int:
    return _RANKS.get(str(node.coords.get("phase")), 3)


def _with_op(terms: Terms) -> dict[str, Match]:
    """Return the terms of a selection, with op="compute" unless it names another op."""
    return {"op": "compute"} | dict(terms)


def _by_mb(selection: Where) -> tuple[Match | None, Terms]:
    """Return the microbatches that a selection asks for, if any, and its other terms."""
    terms = selection.terms
    wanted: Match | None = None
    for k, (name, value) in enumerate(terms):
        if name == "mb":
            wanted, terms = value, terms[:k] + terms[k + 1 :]
            break
    for name, _ in terms:
        if name == "op":
            return wanted, terms
    return wanted, (*terms, _COMPUTE)


_COMPUTE = ("op", "compute")


def _selected(node: Node, wanted: Match) -> Iterable[Mbs | None]:
    """Yield the wanted microbatches of a node: none, or one set of them."""
    if node.mbs is None:
        return (None,) if Where((("mb", wanted),)).matches(node.coords) else ()
    if wanted == ANY:
        return (node.mbs,)
    if isinstance(wanted, str):  # NONE, or a name, which no microbatch has
        return ()
    asked = wanted if isinstance(wanted, tuple) else (wanted,)
    mbs = common(node.mbs, mbs_of([mb for mb in asked if isinstance(mb, int)]))
    return (mbs,) if mbs else ()


def _span(values: list[Coord]) -> str:
    if len(values) > 4 and all(isinstance(v, int) for v in values):
        return f"{values[0]}..{values[-1]}"
    return ", ".join(map(str, values))
