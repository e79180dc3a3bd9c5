"""Find the nodes of a joint graph that a step computes, and the nodes that it reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from torch import fx

from piper_ops import is_draw


@dataclass
class Closure:
    """Hold the nodes that one step computes and reads.

    Attributes:
        body: nodes of the joint graph that it computes.
        needs: nodes whose storages it gets from other steps or the caller.
    """

    body: set[fx.Node] = field(default_factory=set)
    needs: set[fx.Node] = field(default_factory=set)


def close(targets: Iterable[fx.Node], here: Callable[[fx.Node], bool]) -> Closure:
    """Return the nodes to compute for `targets`, when only nodes for which `here` holds may be computed."""
    closure = Closure()
    todo = list(targets)
    while todo:
        node = todo.pop()
        if node in closure.body or node in closure.needs:
            continue
        if node.op == "call_function" and here(node):
            closure.body.add(node)
            todo += node.all_input_nodes
        elif node.op != "get_attr":
            closure.needs.add(node)
    return closure


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
    """Return the random ops up to the last one in `last`: also an unused draw changes the numbers of later draws."""
    random = [n for n in nodes if is_random(n)]
    end = max((i for i, n in enumerate(random, 1) if n in last), default=0)
    return random[:end]


def is_random(node: fx.Node) -> bool:
    """Return whether an op draws random numbers."""
    return is_draw(node.target, node.args, node.kwargs)
