"""Start collectives inside of a step early, and let the step compute until their results are read.

    g = all_gather(x); y = mm(a, b); z = mm(g, w)   ->   g = all_gather(x); y = mm(a, b); h = wait(g, x); z = mm(h, w)

Only collectives that `POSTED` marks are started so. One is under way at a time. It starts as early as its operand and
the one before it allow, so that it may pass operations that come before it in the program; the step waits for it
before the first operation that reads its result, or before the next collective. The wait reads the operand, which
nothing overwrites or frees meanwhile.
"""

from __future__ import annotations

import operator

from torch import fx

from piper_capture.graphs.stepgraph import StepGraph
from piper_capture.values import aliasing
from piper_ops import COLLECTIVE_KINDS, wait

POSTED = "posted"
"""The key of the meta of a collective that may be under way while its step computes."""


def post_collectives(step: StepGraph) -> None:
    """Start the marked collectives of a step as early as possible, and wait for each as late as possible."""
    under_way: fx.Node | None = None
    floor: fx.Node | None = None
    for node in list(step.graph.nodes):
        if node.target not in COLLECTIVE_KINDS:
            continue
        if under_way is not None:
            floor = _waited(step.graph, under_way, before=node)
        under_way = None
        if POSTED in node.meta:
            _advance(node, floor)
            under_way = node
        floor = node
    if under_way is not None:
        _waited(step.graph, under_way, before=step.graph.output_node())


def between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """Return the nodes of a graph between two of them that launch kernels."""
    nodes, node = [], first.next
    while node is not last:
        if _computes(node):
            nodes.append(node)
        node = node.next
    return nodes


def _computes(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and node.target is not operator.getitem
        and node.target not in COLLECTIVE_KINDS
        and not _only_views(node)
    )


def _only_views(node: fx.Node) -> bool:
    """Return whether a node shares a storage and changes nothing in it."""
    schema = getattr(node.target, "_schema", None)
    return aliasing.is_view(node) and not (schema is not None and schema.is_mutable)


def _advance(node: fx.Node, floor: fx.Node | None) -> None:
    """Move a collective up, behind its operand and `floor`, if it passes an operation."""
    (operand,) = node.all_input_nodes
    before, passes = node.prev, False
    while before not in (operand, floor) and before.op == "call_function":
        passes = passes or _computes(before)
        before = before.prev
    if passes:
        before.append(node)


def _waited(graph: fx.Graph, node: fx.Node, before: fx.Node) -> fx.Node:
    """Add the wait for a collective, and return it, or the collective if nothing runs beside it."""
    views, place = {node}, node.next
    while place is not before:
        if any(n in views for n in place.all_input_nodes):
            if not _only_views(place):
                break
            views.add(place)
        place = place.next
    if not between(node, place):
        return node
    with graph.inserting_before(place):
        waiting = graph.create_node("call_function", wait, (node, node.args[0]), name="wait")
    waiting.meta = dict(node.meta)
    node.replace_all_uses_with(waiting, delete_user_cb=lambda user: user is not waiting)
    for view in [n for n in graph.nodes if n in views and n is not node]:
        place.prepend(view)
    return waiting
