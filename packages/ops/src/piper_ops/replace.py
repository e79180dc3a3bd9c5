"""`replace_portable`: rewrites the device-dependent calls of a captured forward graph into piper ops, or refuses them by name."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._guards import detect_fake_mode

from piper_ops.attention import attention
from piper_ops.cross_entropy import REDUCTIONS, cross_entropy
from piper_ops.errors import UnsupportedVariant
from piper_ops.norms import layer_norm, rms_norm
from piper_ops.refusals import REFUSALS

_TORCH = os.path.dirname(torch.__file__)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')

Bound = dict[str, Any]


def replace_portable(gm: fx.GraphModule) -> None:
    """Rewrites `gm`, a forward graph captured by Dynamo, in place, and recompiles it; graphs nested in it as well.

    Every new node carries the `meta` of the call it stands for, so that coordinates and the user's line stay. Autocast regions
    that are disabled are dropped. Raises UnsupportedVariant for a call on the list whose variant has no portable form.
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            _replace(module)


def _replace(gm: fx.GraphModule) -> None:
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        refusal = REFUSALS.get(node.target)
        if refusal is not None and refusal.meets(node):
            raise UnsupportedVariant(f"{_name(node)}: {refusal.reason} ({user_line(node)}). {refusal.way_out}")
        if node.target is torch.amp.autocast_mode._enter_autocast:
            _drop_disabled_autocast(gm.graph, node)
        elif node.target in _REWRITES:
            _rewrite(gm.graph, node)
    gm.graph.lint()
    gm.recompile()


def user_line(node: fx.Node) -> str:
    """"file:line" of the innermost frame of the node's stack trace that is not torch's."""
    frames = [(path, line) for path, line in _FRAME.findall(node.meta.get("stack_trace") or "")]
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)] or frames
    return f"{own[-1][0]}:{own[-1][1]}" if own else f"node {node.name}, no stack trace"


def _name(node: fx.Node) -> str:
    target = node.target
    return getattr(target, "__name__", None) or str(target)


def _drop_disabled_autocast(graph: fx.Graph, enter: fx.Node) -> None:
    # Piper runs its chunks outside autocast, where a disabled region changes nothing
    for leave in list(enter.users):
        graph.erase_node(leave)
    graph.erase_node(enter)


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    names, rewrite = _REWRITES[node.target]
    bound = dict(zip(names, node.args, strict=False)) | node.kwargs
    unknown = bound.keys() - set(names)
    if unknown or len(node.args) > len(names):
        raise _unsupported(node, f"arguments {sorted(unknown) or node.args} are not known", "Use its documented arguments.")
    with graph.inserting_before(node):
        result = rewrite(_Builder(graph, node), bound)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _unsupported(node: fx.Node, variant: str, way_out: str) -> UnsupportedVariant:
    return UnsupportedVariant(f"{_name(node)}: {variant} ({user_line(node)}). {way_out}")


class _Builder:
    """Adds nodes in place of `old`, with its meta and an example value of their own."""

    def __init__(self, graph: fx.Graph, old: fx.Node) -> None:
        self.graph = graph
        self.old = old

    def call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta = dict(self.old.meta)
        values = fx.map_arg(args, example)
        mode = detect_fake_mode([v for v in values if isinstance(v, Tensor)])
        try:
            if mode is None:
                node.meta["example_value"] = target(*values)
            else:
                with mode:
                    node.meta["example_value"] = target(*values)
        except UnsupportedVariant as error:
            raise self.refuse(str(error).removeprefix(f"{_name(self.old)}: "), "Rewrite the call so.") from error
        return node

    def method(self, name: str, tensor: fx.Node, *args: Any) -> fx.Node:
        node = self.graph.call_method(name, (tensor, *args))
        node.meta = dict(self.old.meta)
        node.meta["example_value"] = getattr(example(tensor), name)(*args)
        return node

    def first(self, call: fx.Node) -> fx.Node:
        return self.call(operator.getitem, call, 0)

    def refuse(self, variant: str, way_out: str) -> UnsupportedVariant:
        return _unsupported(self.old, variant, way_out)


def example(node: fx.Node) -> Any:
    """The node's example value. Raises UnsupportedVariant when Dynamo left none."""
    if "example_value" not in node.meta:
        raise UnsupportedVariant(f"{node.name} has no example value: replace_portable takes a graph that Dynamo captured")
    return node.meta["example_value"]
