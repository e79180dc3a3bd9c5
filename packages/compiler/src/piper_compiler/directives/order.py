"""order: run all compute of one selection before all compute of the next, on each device where both occur.

    before  pp0: layer0.F@0, layer0.F@1, layer0.B@0 in any order that the data allows
            order(where(mb=0, phase="F"), where(mb=1, phase="F"), where(mb=0, phase="B"))
    after   pp0: layer0.F@0 -> layer0.F@1 -> layer0.B@0

Legality
 1. At least two selections, each of which matches compute nodes. (With missing="skip" a selection of phase "B" whose region
    has no backward, because it trains nothing, is left out.)
 2. No node is in two selections.
 3. If anything is placed, the selected nodes are: an order is per device.
 4. On at least one device two of the selections occur: otherwise the directive would have no effect.
 (That all orders together are acyclic is checked once, when the strategy is complete; the error names the directives on the
 cycle.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from piper_compiler.directives.base import call_site, compute_nodes, directive, fail, names, site_field
from piper_ir.errors import SelectorError
from piper_ir.graph import Graph, Node
from piper_ir.select import Where


@directive
@dataclass(frozen=True, init=False)
class Order:
    """Within a selection the nodes of a device run along the program (F ascending, backward descending). Communication
    follows its data. `items` are selections or tuples of them."""

    selections: tuple[Where, ...]
    missing: Literal["error", "skip"] = "error"
    site: str = site_field()

    def __init__(
        self,
        *items: Where | tuple[Where, ...],
        selections: tuple[Where, ...] = (),
        missing: Literal["error", "skip"] = "error",
        site: str | None = None,
    ) -> None:
        flat = [s for x in (*items, *selections) for s in (x if isinstance(x, tuple) else (x,))]
        object.__setattr__(self, "selections", tuple(flat))
        object.__setattr__(self, "missing", missing)
        object.__setattr__(self, "site", call_site() if site is None else site)

    def check(self, graph: Graph) -> None:
        if len(self.selections) < 2:
            raise fail(self, 1, "an order needs at least two selections")
        seen: dict[str, Where] = {}
        devices: dict[str, int] = {}
        selected = self._selected(graph)
        for selection, nodes in selected:
            for node in nodes:
                if node.id in seen:
                    raise fail(self, 2, f"{node.id} is in {seen[node.id]} and in {selection}")
                seen[node.id] = selection
            unplaced = [n for n in nodes if not n.role]
            if graph.roles and unplaced:
                raise fail(self, 3, f"{names(unplaced)} is not placed; write place before order")
            for role in {n.role for n in nodes}:
                devices[role] = devices.get(role, 0) + 1
        if len(selected) > 1 and max(devices.values()) < 2:
            raise fail(self, 4, "no two of the selections share a device, so nothing would be ordered")

    def apply(self, graph: Graph) -> Graph:
        edit = graph.edit()
        last: dict[str, Node] = {}
        for _, nodes in self._selected(graph):
            for node in nodes:
                if node.role in last:
                    edit.order(last[node.role].id, node.id)
                last[node.role] = node
        return edit.done()

    def _selected(self, graph: Graph) -> list[tuple[Where, list[Node]]]:
        """The selections with their nodes, without those that may be missing and are."""
        out = []
        for selection in self.selections:
            try:
                out.append((selection, compute_nodes(self, graph, selection)))
            except SelectorError:
                if self.missing != "skip" or not _has_only_forward(graph, selection):
                    raise
        return out


def _has_only_forward(graph: Graph, selection: Where) -> bool:
    """Whether a selection that matches nothing asks for the backward of a region that has only a forward."""
    terms = dict(selection.terms)
    return terms.get("phase") == "B" and bool(graph.matching(Where(tuple((terms | {"phase": "F"}).items()))))
