"""Find which nodes of a joint graph a step computes, and which it reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from torch import fx

from piper_ops import is_draw


@dataclass
class Closure:
    """Say what one step computes.

    Attributes:
        body: nodes of the joint graph.
        needs: nodes whose storages come from elsewhere.
    """

    body: set[fx.Node] = field(default_factory=set)
    needs: set[fx.Node] = field(default_factory=set)


def close(targets: Iterable[fx.Node], here: Callable[[fx.Node], bool]) -> Closure:
    """Return the nodes to compute for `targets`, when only nodes for which `here` holds may be computed."""
    found = Closure()
    todo = list(targets)
    while todo:
        node = todo.pop()
        if node in found.body or node in found.needs:
            continue
        if node.op == "call_function" and here(node):
            found.body.add(node)
            todo += node.all_input_nodes
        elif node.op != "get_attr":
            found.needs.add(node)
    return found


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return `nodes` and everything that they depend on."""
    seen: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    return seen


def drawn_before(last: Collection[fx.Node], nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the random ops up to the last one in `last`: numbers that nobody reads move those that are drawn after."""
    random = [n for n in nodes if is_random(n)]
    end = max((i for i, n in enumerate(random, 1) if n in last), default=0)
    return random[:end]


def is_random(node: fx.Node) -> bool:
    """Return whether an op draws random numbers."""
    return is_draw(node.target, node.args, node.kwargs)
