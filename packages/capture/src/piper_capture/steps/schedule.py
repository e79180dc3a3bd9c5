"""Decide the order of a step's ops, and the place to delete each variable.

The generated code and the liveness analysis both follow it. A step is a list of lines, one per op. A line makes some
variables, and deletes right after it the variables in `drops`, which are not used afterwards. A storage is freed when
the last variable that uses it is dropped.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from piper_capture.graphs.stepgraph import StepGraph
from piper_capture.values import aliasing


@dataclass(frozen=True)
class Line:
    """Hold one line of a step.

    Attributes:
        makes: the variables that the op assigns; for an op with several results its getitem nodes, in their order.
        drops: the variables that have their last use here.
    """

    node: fx.Node
    makes: tuple[fx.Node, ...]
    drops: tuple[fx.Node, ...]


def schedule(step: StepGraph) -> tuple[Line, ...]:
    """Return the lines of a step in graph order; a getitem belongs to the line of its op."""
    nodes = [
        n for n in step.graph.nodes if n.op == "call_function" and n.target is not operator.getitem
    ]
    line_of = {n: i for i, n in enumerate(nodes)}
    makes = [_results(n) for n in nodes]
    last: dict[fx.Node, int] = {}
    for node in step.graph.nodes:
        users = [u for u in node.users if u.target is not operator.getitem]
        if node.op == "get_attr" or any(u.op == "output" for u in users):
            continue
        if node.op == "placeholder" or node in line_of or node.target is operator.getitem:
            own = line_of.get(aliasing.producer(node), 0)
            last[node] = max((line_of[u] for u in users), default=own)
    drops: list[list[fx.Node]] = [[] for _ in nodes]
    for node, line in last.items():
        is_variable = node.op == "placeholder" or node in makes[line_of[aliasing.producer(node)]]
        if is_variable and nodes:
            drops[line].append(node)
    return tuple(Line(n, m, tuple(d)) for n, m, d in zip(nodes, makes, drops, strict=True))


def _results(node: fx.Node) -> tuple[fx.Node, ...]:
    items = [u for u in node.users if u.target is operator.getitem]
    return tuple(sorted(items, key=lambda u: int(u.args[1]))) if items else (node,)  # type: ignore[arg-type]  # getitem: (source, index)
