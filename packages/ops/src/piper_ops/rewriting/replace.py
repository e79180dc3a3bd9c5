"""Rewrite the device-dependent calls of a captured forward graph into piper ops, or refuse them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from piper_ops.rewriting.batch_norm import (
    BATCH_NORMS,
    BatchNorm,
    described,
    rewrite_batch_norm,
    uses_batch,
)
from piper_ops.rewriting.builder import Bound, Builder, unsupported
from piper_ops.rewriting.flex_calls import FLEX, rewrite_flex
from piper_ops.rewriting.refusals import REFUSALS
from piper_ops.rewriting.rewrites import REWRITES, Rewrite
from piper_ops.written.examples import Examples


def replace_portable(
    gm: fx.GraphModule,
    opaque: Callable[[fx.Node], bool] = lambda _: False,
    *,
    statistics: bool = False,
) -> tuple[BatchNorm, ...]:
    """Rewrite a forward graph that Dynamo captured, in place, with the graphs nested in it, and recompile it.

    Every new node carries the `meta` of the call that it stands for, so that coordinates and the user's line stay.
    Autocast regions that are disabled are dropped. Calls that are `opaque` stay as they are; only calls that would
    train another model are refused there. With `statistics` batch norms take the statistics of the microbatch, and
    these batch norms are returned. Raises UnsupportedVariant for a call on the list whose variant has no portable form;
    the graph is then not usable.
    """
    examples, batch_norms = Examples(), list[BatchNorm]()
    for module in list(gm.modules()):
        if isinstance(module, fx.GraphModule):
            if statistics:
                batch_norms += _batch_norms(module, opaque, examples)
            _replace(module, opaque, examples)
    return tuple(batch_norms)


def _batch_norms(
    gm: fx.GraphModule, opaque: Callable[[fx.Node], bool], examples: Examples
) -> Iterator[BatchNorm]:
    """Rewrite batch norms with statistics of the batch; raise UnsupportedVariant for opaque ones."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in BATCH_NORMS:
            bound = dict(zip(BATCH_NORMS[node.target], node.args, strict=False)) | node.kwargs
            if uses_batch(bound):
                if opaque(node):
                    reason = (
                        "batch statistics inside an opaque region, where its kernel keeps other "
                        "bytes on every device"
                    )
                    raise unsupported(node, reason, "Leave it outside of the region.")
                yield described(node, bound)
                _put(gm.graph, node, rewrite_batch_norm, bound, examples)


def _replace(gm: fx.GraphModule, opaque: Callable[[fx.Node], bool], examples: Examples) -> None:
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        refusal, kept = REFUSALS.get(node.target), opaque(node)
        if refusal is not None and refusal.meets(node) and (refusal.everywhere or not kept):
            raise unsupported(node, refusal.reason, refusal.way_out)
        if node.target is torch.amp.autocast_mode._enter_autocast:
            _drop_disabled_autocast(gm.graph, node)
        elif node.target in REWRITES and not kept:
            _rewrite(gm.graph, node, examples)
        elif node.target is FLEX and not kept:
            _rewrite_flex(gm, node, examples)
    gm.graph.lint()
    gm.recompile()


def _drop_disabled_autocast(graph: fx.Graph, enter: fx.Node) -> None:
    # chunks run outside autocast, where a disabled region changes nothing
    for leave in list(enter.users):
        graph.erase_node(leave)
    graph.erase_node(enter)


def _rewrite(graph: fx.Graph, node: fx.Node, examples: Examples) -> None:
    names, rewrite = REWRITES[node.target]
    bound = dict(zip(names, node.args, strict=False)) | node.kwargs
    unknown = sorted(bound.keys() - set(names)) or node.args[len(names) :]
    if unknown:
        raise unsupported(node, f"unknown arguments {unknown}", f"Known are {', '.join(names)}.")
    _put(graph, node, rewrite, bound, examples)


def _put(
    graph: fx.Graph, node: fx.Node, rewrite: Rewrite, bound: Bound, examples: Examples
) -> None:
    """Replace a node by the result of a rewrite."""
    with graph.inserting_before(node):
        result = rewrite(Builder(graph, node, examples), bound)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    if _dtype(result) != _dtype(node):
        _refresh(result, examples)


def _rewrite_flex(gm: fx.GraphModule, node: fx.Node, examples: Examples) -> None:
    with gm.graph.inserting_before(node):
        new_nodes = rewrite_flex(Builder(gm.graph, node, examples), gm)
    for result in new_nodes:
        _refresh(result, examples)
    gm.delete_all_unused_submodules()


def _refresh(wider: fx.Node, examples: Examples) -> None:
    """Compute the example values of all nodes after a result that has another dtype than the call that it stands for.

    The loss of bfloat16 logits does: it is float32. So are the values that the model computes from it.
    """
    changed, node = {wider}, wider.next
    while node.op != "root":
        if node.op in ("call_function", "call_method") and changed.intersection(
            node.all_input_nodes
        ):
            before = _dtype(node)
            node.meta["example_value"] = _example(node, examples)
            if _dtype(node) != before:
                changed.add(node)
        node = node.next


def _example(node: fx.Node, examples: Examples) -> Any:
    def function(*args: Any) -> Any:
        call = getattr(args[0], node.target) if isinstance(node.target, str) else node.target
        return call(*(args[1:] if isinstance(node.target, str) else args), **kwargs)

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["example_value"])
    try:
        with torch.set_grad_enabled(getattr(node.meta["example_value"], "requires_grad", True)):
            return examples.of((node.target, str(node.kwargs)), function, *args)
    except (RuntimeError, TypeError, ValueError) as error:
        advice = "The loss of bfloat16 logits is float32 here: cast one of them."
        raise unsupported(node, f"it cannot be computed: {error}", advice) from error


def _dtype(node: fx.Node) -> object:
    return getattr(node.meta.get("example_value"), "dtype", None)
