"""Compute the divisors of a loss in float32 at least: bfloat16 cannot count beyond 256."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from piper_capture.whole_batch.batch_loss.reductions import MEANS, SUMS, call_name
from piper_capture.whole_batch.batch_loss.writers import SAME
from piper_ops import Builder, Examples

_ROUNDED = frozenset({"to", "type", "type_as", "half", "bfloat16", "_to_copy"})
_ARITHMETIC = frozenset({"add", "sub", "mul", "div"})


def is_half(node: fx.Node) -> bool:
    """Return whether a node's tensor has half precision."""
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def wide(node: fx.Node, examples: Examples) -> fx.Node:
    """Return a number before its rounding to half precision; a number of another dtype stays the same node.

    Its sums, casts and products are made again in float32, behind the rounded ones.
    """
    if not is_half(node) or node.op == "placeholder":
        return node
    name, first = call_name(node), node.args[0]
    with node.graph.inserting_before(node.next):
        build = Builder(node.graph, node, examples)
        if name in _ROUNDED and isinstance(first, fx.Node):
            return build.method("to", wide(first, examples), torch.float32)
        if name not in SUMS | MEANS | _ARITHMETIC | SAME:
            return build.method("to", node, torch.float32)
        copied = node.graph.node_copy(node, lambda n: n)
        if name in SUMS | MEANS:
            copied.kwargs = {**node.kwargs, "dtype": torch.float32}
        else:
            copied.args = map_arg(node.args, lambda arg: wide(arg, examples))
        value: Any = node.meta["example_value"]
        with build.computing():
            copied.meta = {**node.meta, "example_value": value.to(torch.float32)}
    return copied
