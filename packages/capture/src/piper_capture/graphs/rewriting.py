"""Apply rules to the nodes of a graph: the driver of all rewrites that look at one op and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from piper_capture.graphs.closures import ancestors, drawn_before
from piper_capture.torch_api._torch_joint import OpOverload
from piper_capture.values import aliasing
from piper_ops import float8_cast, float8_past_scale, float8_scale

Rule = Callable[[fx.Graph, fx.Node], fx.Node | None]
"""A rule returns the node that stands for the given one from now on, or None if it does not apply."""
SHARED = frozenset({float8_scale, float8_past_scale, float8_cast})
"""The ops that are made once where several would give the same: layers that read one tensor quantise it together."""
COPIES = frozenset({torch.ops.aten.clone.default, torch.ops.aten._to_copy.default})


def rewrite(graph: fx.Graph, rules: Sequence[Rule], buffers: Collection[fx.Node] = ()) -> None:
    """Apply the rules to each node of `graph` in order, in place, and let equal views, and SHARED ops, be one node.

    A copy of one of the `buffers` stays, because backward may read it after the buffer has changed.
    """
    views: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        if node.target in COPIES and aliasing.root(node.all_input_nodes[0]) in buffers:
            continue
        simpler = _apply(graph, rules, node)
        if not simpler.users or simpler.op != "call_function":
            continue
        if aliasing.is_view(simpler) or simpler.target in SHARED:
            key = (
                simpler.target,
                _freeze(simpler.args),
                _freeze(simpler.kwargs),
                simpler.meta.get("partitioner_tag"),
            )
            simpler = _replace(graph, simpler, views.setdefault(key, simpler))
    drawn = set(drawn_before(ancestors([graph.output_node()]), graph.nodes))
    graph.eliminate_dead_code(
        is_impure_node=lambda n: n.op in ("placeholder", "output") or n in drawn
    )


def new_node(
    graph: fx.Graph, before: fx.Node, target: OpOverload, args: tuple[Any, ...], **kwargs: Any
) -> fx.Node:
    """Return a new node with the meta of the node that it replaces."""
    with graph.inserting_before(before):
        new = graph.call_function(target, args, kwargs)
    new.meta = dict(before.meta)
    return new


def _apply(graph: fx.Graph, rules: Sequence[Rule], node: fx.Node) -> fx.Node:
    """Return `node` after all rules; a rule that returns an older, already simple node ends the search."""
    for rule in rules:
        replacement = rule(graph, node)
        if replacement is not None:
            is_new = not replacement.users
            node = _replace(graph, node, replacement)
            if not is_new:
                break
    return node


def _replace(graph: fx.Graph, node: fx.Node, by: fx.Node) -> fx.Node:
    if by is not node:
        node.replace_all_uses_with(by)
        graph.erase_node(node)
    return by


def _freeze(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_freeze(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _freeze(v)) for k, v in sorted(value.items()))
    return (type(value), value)
