"""Define `order`: run all compute of one selection before all compute of the next, on each device where both occur.

    before  pp0: layer0.F@0, layer0.F@1, layer0.B@0 in any order that data edges allow
            order(where(mb=0, phase="F"), where(mb=1, phase="F"), where(mb=0, phase="B"))
    after   pp0: layer0.F@0 -> layer0.F@1 -> layer0.B@0

`overlap(a, b)` takes one place in an order: the compute of a and b may be interleaved there. The whole item before it
comes before both, and the whole item after it comes after both. The compiler chooses the order among them
(`passes.order.overlap`).

An item may name the gathers of parameters or the reductions of gradients of the selected chunks, where(op="gather") or
where(op="reduce"): messages on buckets, which exist when the strategy is complete. They begin after the nodes of
earlier items, and end before the nodes of later ones begin.

A send that an order names comes after the nodes of earlier selections, and ends before the nodes of later ones begin.
Sends of one device may so be put into another order than that of the compute that makes their values.

Legality

1. There are at least two selections, and each matches compute nodes, sends, or chunks for messages on buckets. (With
   missing="skip" a selection of a backward phase is left out if its region has no such phase.)
2. No node is in two selections.
3. If anything is placed, the selected nodes are: an order is per device.
4. On at least one device two of the selections occur: otherwise the directive would have no effect.
5. An overlap has at least two selections, and stands inside of an order.
6. Of communication an order names sends (op="send"), gathers and reductions, outside of overlaps. A receive stands
   where its send does. Gathers and reductions are of the whole step, without mb and phase.
7. A gather or reduction that it names is made once in a step on that device: with states shared (zero=1), of parameters
   up to whole_mb; of gradients that ranks keep whole (zero=0 or 1). Others follow their uses.

That all orders together are acyclic is checked once, when the strategy is complete; the error names the directives on
the cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise, product
from typing import Any, Literal

from piper_compiler.directives.base import (
    call_site,
    compute_nodes,
    directive,
    fail,
    names,
    site_field,
)
from piper_compiler.directives.decided import Decided
from piper_ir.graph.graph import At, Editor, Graph, Node, OverlapGroup
from piper_ir.graph.graph_parts import MessageOrder, OrderEnd, in_mbs, mbs_of
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.select import Where
from piper_ir.program.ops import COMM, Send

_Chains = tuple[Where, Mapping[str, tuple[At, ...]]]
"""A selection, and its nodes on each role along the program."""


@dataclass(frozen=True, init=False)
class Overlap:
    """Mark an item of an order whose selections may be interleaved."""

    selections: tuple[Where, ...]

    def __init__(self, *selections: Where) -> None:
        object.__setattr__(self, "selections", selections)


@directive
@dataclass(frozen=True, init=False)
class Order:
    """Run the items one after the other on each device.

    Within a selection the nodes of a device run along the program (F ascending, backward descending). Communication
    follows its data, but for sends, gathers and reductions that a selection names by `op`. The items are selections,
    overlaps, or tuples of them.

    Attributes:
        missing: whether a selection of a backward phase that its region cannot have is an error or skipped.
        overlaps: (first, number) of each run of selections that forms an overlap.
        site: where the user wrote it.
    """

    selections: tuple[Where, ...]
    missing: Literal["error", "skip"] = "error"
    overlaps: tuple[tuple[int, int], ...] = ()
    site: str = site_field()

    def __init__(
        self,
        *items: Where | Overlap | tuple[Where | Overlap, ...],
        selections: tuple[Where, ...] = (),
        missing: Literal["error", "skip"] = "error",
        overlaps: tuple[tuple[int, int], ...] = (),
        site: str | None = None,
    ) -> None:
        flat: list[Where] = []
        groups: list[tuple[int, int]] = []
        for item in (
            x
            for argument in items
            for x in (argument if isinstance(argument, tuple) else (argument,))
        ):
            if isinstance(item, Overlap):
                groups.append((len(flat), len(item.selections)))
                flat += item.selections
            else:
                flat.append(item)
        groups += [(first + len(flat), number) for first, number in overlaps]
        object.__setattr__(self, "selections", (*flat, *selections))
        object.__setattr__(self, "missing", missing)
        object.__setattr__(self, "overlaps", tuple(groups))
        object.__setattr__(self, "site", call_site() if site is None else site)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the terms as tuples: an order has thousands of selections, and searches send it to workers."""
        if type(self) is not Order:  # further fields of a user's class are not known here
            return _bare, (type(self),), vars(self)
        return _order, (
            tuple([s.terms for s in self.selections]),
            self.missing,
            self.overlaps,
            self.site,
        )

    def __str__(self) -> str:
        """Return the order about as the user wrote it; long lists are cut."""
        shown = islice(self._items(), 3)
        items = [
            ", ".join(map(str, item)) if len(item) == 1 else f"overlap({', '.join(map(str, item))})"
            for item in shown
        ]
        count = len(self.selections) - sum(number - 1 for _, number in self.overlaps)
        more = [f"... {count - 3} more"] if count > 3 else []
        skip = ["missing='skip'"] if self.missing == "skip" else []
        return f"order({', '.join([*items, *more, *skip])})"

    def check(self, graph: Graph) -> None:
        if len(self.selections) < 2:
            raise fail(self, 1, "an order needs at least two selections")
        self._check_overlaps()
        self._check_communication(graph)
        selected = [pair for item in self._selected(graph) for pair in item]
        every = [nodes for _, chains in selected for nodes in chains.values()]
        if len(set(chain.from_iterable(every))) < sum(map(len, every)):
            raise self._twice(graph)
        messages = [m for m in map(partial(_messages, self, graph), self.selections) if m]
        devices = Counter([role for _, chains in selected for role in chains])
        devices.update([role for chunks_by_role in messages for role in chunks_by_role])
        if graph.roles and "" in devices:
            unplaced = next(
                (_each(graph, at) for _, chains in selected if (at := chains.get(""))),
                graph.find(Where()),
            )
            raise fail(self, 3, f"{names(graph, unplaced)} is not placed; write place before order")
        if len(selected) + len(messages) > 1 and max(devices.values()) < 2:
            raise fail(
                self, 4, "no two of the selections share a device, so nothing would be ordered"
            )

    def _twice(self, graph: Graph) -> DirectiveError:
        """Return the error for the first node that is in two selections."""
        seen: dict[At, Where] = {}
        for selection, _ in [pair for item in self._selected(graph) for pair in item]:
            for node, mb in graph.turns(selection):
                if (at := (node.id, mb)) in seen:
                    return fail(self, 2, f"{node.name(mb)} is in {seen[at]} and in {selection}")
                seen[at] = selection
        raise AssertionError("no node is selected twice")

    def _check_overlaps(self) -> None:
        """Check the ranges of overlaps, which may hold anything in a strategy from a file."""
        end = 0
        for first, number in self.overlaps:
            if number < 2:
                raise fail(self, 5, "an overlap needs at least two selections")
            if first < end or first + number > len(self.selections):
                raise fail(
                    self,
                    5,
                    f"the overlap of {number} selections from number {first} is not inside of the order",
                )
            end = first + number

    def _check_communication(self, graph: Graph) -> None:
        """Check that communication is named by its sends, gathers or reductions, outside of overlaps."""
        inside = {k for first, number in self.overlaps for k in range(first, first + number)}
        for k, selection in enumerate(self.selections):
            terms = dict(selection.terms)
            if "op" not in terms:
                continue
            if terms["op"] in _MESSAGE_OPS:
                if k in inside:
                    raise fail(self, 6, f"{selection}: an overlap is of compute; name it outside")
                if {"mb", "phase"} & terms.keys():
                    text = "a gather or reduction is of the whole step; leave mb and phase out"
                    raise fail(self, 6, f"{selection}: {text}")
                continue
            nodes = [n for n in compute_nodes(self, graph, selection) if isinstance(n.op, COMM)]
            other = [n for n in nodes if not isinstance(n.op, Send)]
            if other:
                text = "an order names no receives, as one stands where its send does"
                raise fail(self, 6, f'{names(graph, other)}: {text}; write op="send"')
            if nodes and k in inside:
                text = "an overlap is of compute; name the send before or behind it"
                raise fail(self, 6, f"{names(graph, nodes)}: {text}")

    def decided(self) -> Decided | None:
        """Return its decisions before it is compiled."""
        return Decided(order=self)

    def apply(self, graph: Graph) -> Graph:
        edit = graph.edit()
        if any(dict(s.terms).get("op") in _MESSAGE_OPS for s in self.selections):
            self._order_messages(edit, graph)
        if not self.overlaps:
            self._in_turn(edit, self._selected(graph))
            return edit.done()
        last: dict[str, list[At]] = {}
        edges, applied = edit.order_edges, edit.applied
        for item in self._selected(graph):
            members: dict[
                str, list[tuple[At, ...]]
            ] = {}  # role -> the nodes of each selection that has some there
            for _, mine in item:
                for role, nodes in mine.items():
                    members.setdefault(role, []).append(nodes)
                    for before in last.get(role, ()):
                        edges.setdefault((before, nodes[0]), applied)
                    if len(nodes) > 1:
                        for pair in pairwise(nodes):
                            edges.setdefault(pair, applied)
            for role, several in members.items():
                last[role] = [nodes[-1] for nodes in several]
                if len(several) > 1:
                    edit.overlaps.append(OverlapGroup(tuple(several), applied))
        return edit.done()

    def _order_messages(self, edit: Editor, graph: Graph) -> None:
        """Order each gather and reduction between the items beside it, on each device where both occur."""
        chains, last = graph.chains(self.selections), dict[str, list[OrderEnd]]()
        for first, end in self._ranges():
            heads: dict[str, list[OrderEnd]] = {}
            tails: dict[str, list[OrderEnd]] = {}
            for selection, nodes_by_role in zip(
                self.selections[first:end], chains[first:end], strict=True
            ):
                for role, chunks in _messages(self, graph, selection).items():
                    message = OrderEnd(str(dict(selection.terms)["op"]), chunks=chunks)
                    heads[role] = tails[role] = [message]
                for role, nodes in nodes_by_role.items():
                    heads.setdefault(role, []).append(OrderEnd(*nodes[0]))
                    tails.setdefault(role, []).append(OrderEnd(*nodes[-1]))
            for role, ends in heads.items():
                pairs = product(last.get(role, ()), ends)
                edit.message_orders += [
                    MessageOrder(role, a, b, edit.applied) for a, b in pairs if a.chunks or b.chunks
                ]
            last |= tails

    def _in_turn(self, edit: Editor, selected: list[list[_Chains]]) -> None:
        """Order the selections one after the other."""
        last: dict[str, At] = {}
        edges, applied = edit.order_edges, edit.applied
        for item in selected:
            for _, chains in item:
                for role, nodes in chains.items():
                    before = last.get(role)
                    for node in nodes:
                        if before is not None:
                            edges.setdefault((before, node), applied)
                        before = node
                    last[role] = nodes[-1]

    def _items(self) -> Iterator[tuple[Where, ...]]:
        """Yield the places of the order: one selection each, or the selections of an overlap."""
        return (self.selections[first:end] for first, end in self._ranges())

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Yield for each place of the order which selections it has."""
        numbers, k = dict(self.overlaps), 0
        while k < len(self.selections):
            n = numbers.get(k, 1)
            yield k, k + n
            k += n

    def _selected(self, graph: Graph) -> list[list[_Chains]]:
        """Return the items with the nodes of their selections by role.

        Selections that may be missing and are missing are left out.
        """
        return graph.kept(self, lambda: self._by_item(graph))

    def _by_item(self, graph: Graph) -> list[list[_Chains]]:
        each: list[_Chains] = list(zip(self.selections, graph.chains(self.selections), strict=True))
        for selection, matched in each:
            if dict(selection.terms).get("op") in _MESSAGE_OPS:
                continue
            if not matched and (self.missing != "skip" or not has_no_such_phase(graph, selection)):
                compute_nodes(self, graph, selection)  # says that there are none
        if not self.overlaps:
            return [[pair] for pair in each if pair[1]]
        return [[pair for pair in each[first:end] if pair[1]] for first, end in self._ranges()]


_MESSAGE_OPS = ("gather", "reduce")
"""The words by which an order names messages on buckets."""


def _messages(item: Order, graph: Graph, selection: Where) -> Mapping[str, tuple[str, ...]]:
    """Return by role the chunks whose gathers or reductions a selection names; nothing if it names none."""
    terms = dict(selection.terms)
    if terms.get("op") not in _MESSAGE_OPS:
        return {}
    rest = Where(tuple((name, value) for name, value in terms.items() if name != "op"))
    chunks: dict[str, dict[str, None]] = {}
    for node in compute_nodes(item, graph, rest):
        chunks.setdefault(node.role, {})[str(node.coords["chunk"])] = None
    return {role: tuple(found) for role, found in chunks.items()}


def has_no_such_phase(graph: Graph, selection: Where) -> bool:
    """Return whether a selection without matches asks for a phase that its region cannot have.

    A region that trains nothing has no B, I or W; a split backward may consist of I alone or of W alone. There is an R
    only if a recompute directive asks for it as a node.
    """
    terms = dict(selection.terms)
    phase = terms.pop("phase", None)
    if phase not in ("B", "R", "I", "W"):
        return False
    there = {n.coords["phase"] for n in graph.find(Where(tuple(terms.items())))} - {"R"}
    if phase == "R":
        return bool(there)
    return there == {"F"} or (phase != "B" and there in ({"F", "I"}, {"F", "W"}))


def _each(graph: Graph, places: Iterable[At]) -> list[Node]:
    return [
        in_mbs(node, mbs_of((mb,)) if mb >= 0 else None)
        for id, mb in places
        if (node := graph.at((id, mb)))
    ]


def _bare(kind: type[Order]) -> Order:
    return object.__new__(kind)


def _order(
    terms: Iterable[Any],
    missing: Literal["error", "skip"],
    overlaps: tuple[tuple[int, int], ...],
    site: str,
) -> Order:
    return Order(
        selections=tuple(map(Where.of, terms)), missing=missing, overlaps=overlaps, site=site
    )
