"""Rewrite each device-dependent call that Dynamo leaves in a graph into a piper op, argument by argument."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from piper_ops.errors import UnsupportedVariant
from piper_ops.examples import Examples
from piper_ops.frames import is_model_code
from piper_ops.losses import cross_entropy
from piper_ops.norms import layer_norm, rms_norm
from piper_ops.sdpa import attention

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')

Bound = Mapping[str, Any]


def call_name(node: fx.Node) -> str:
    """Return the function that a node calls, by the name that the user knows."""
    return getattr(node.target, "__name__", None) or str(node.target)


def user_line(node: fx.Node) -> str:
    """Return "file:line" of the innermost frame of the node's stack trace that belongs to the model.

    A node without a trace, such as the entry of a context manager, gives "before file:line" of the next node that has
    one.
    """
    traced = node
    while traced.op != "root" and not traced.meta.get("stack_trace"):
        traced = traced.next
    frames: list[tuple[str, str]] = _FRAME.findall(traced.meta.get("stack_trace") or "")
    own = [frame for frame in frames if is_model_code(frame[0])] or frames
    if not own:
        return f"node {node.name}, which has no stack trace"
    return f"{'' if traced is node else 'before '}{own[-1][0]}:{own[-1][1]}"


def unsupported(node: fx.Node, variant: str, way_out: str) -> UnsupportedVariant:
    """Return the refusal of a call: its name, the unsupported variant, its line, and the way out."""
    return UnsupportedVariant(f"{call_name(node)}: {variant} ({user_line(node)}). {way_out}")


class Builder:
    """Add nodes in place of `old`: each has its meta, and the example value of its own call."""

    def __init__(self, graph: fx.Graph, old: fx.Node, examples: Examples) -> None:
        self.graph = graph
        self.old = old
        self._examples = examples

    def call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        """Add a call of `target`; arguments are nodes or constants."""
        return self._finish(self.graph.call_function(target, args), target)

    def method(self, name: str, *args: Any) -> fx.Node:
        """Add a call of the tensor method `name` on the first argument."""
        return self._finish(self.graph.call_method(name, args), lambda tensor, *rest: getattr(tensor, name)(*rest))

    def first(self, call: fx.Node) -> fx.Node:
        """Add the selection of the first result of a call that has several."""
        return self.call(operator.getitem, call, 0)

    def swap(self, tensor: fx.Node) -> fx.Node:
        """Return `tensor` with heads and positions exchanged, or what the model itself exchanged to get it."""
        if _is_swap(tensor) and isinstance(tensor.args[0], fx.Node):
            return tensor.args[0]
        return self.method("transpose", tensor, 1, 2)

    def example(self, node: fx.Node) -> Any:
        """Return the node's example value; raise UnsupportedVariant when it has none."""
        if "example_value" not in node.meta:
            raise self.refuse(f"its argument {node.name} has no example value", "Give the graph as Dynamo captured it.")
        return node.meta["example_value"]

    def refuse(self, variant: str, way_out: str) -> UnsupportedVariant:
        """Return an `unsupported` for the node that is being replaced, to be raised."""
        return unsupported(self.old, variant, way_out)

    def _finish(self, node: fx.Node, function: Callable[..., Any]) -> fx.Node:
        values = fx.map_arg(node.args, self.example)
        try:
            with torch.set_grad_enabled(bool(self.example(self.old).requires_grad)):
                value = self._examples.of(node.target, function, *values)
        except UnsupportedVariant as error:
            raise UnsupportedVariant(f"{error} ({user_line(self.old)})") from error
        node.meta = {**self.old.meta, "example_value": value}
        return node


def _is_swap(node: fx.Node) -> bool:
    if node.op != "call_method" or node.target != "transpose" or node.kwargs or len(node.args) != 3:
        return False
    dims = [d % 4 if isinstance(d, int) else d for d in node.args[1:]]
    example = node.meta.get("example_value")
    return sorted(map(str, dims)) == ["1", "2"] and isinstance(example, torch.Tensor) and example.dim() == 4


def constant(build: Builder, bound: Bound, name: str, default: Any) -> Any:
    """Return an argument that must not be computed in the model."""
    value = bound.get(name, default)
    if isinstance(value, fx.Node):
        raise build.refuse(f"{name} is computed in the model", f"Make {name} a Python constant.")
    return value


def _rewrite_attention(build: Builder, bound: Bound) -> fx.Node:
    dropout = constant(build, bound, "dropout_p", 0.0)
    if dropout:
        raise build.refuse(
            f"dropout_p={dropout} inside attention draws other random numbers in every kernel",
            "Write this attention out: F.dropout(torch.softmax(q @ k.mT * scale + mask, -1), p, self.training) @ v.",
        )
    q, k, v, mask = bound["query"], bound["key"], bound["value"], bound.get("attn_mask")
    dims = [build.example(t).dim() for t in (q, k, v)]
    if dims != [4, 4, 4]:
        raise build.refuse(
            f"query, key and value have {dims} dimensions", "Give each as [batch, heads, T, head_dim], such as q[:, None]."
        )
    if mask is not None and build.example(mask).requires_grad:
        raise build.refuse(
            "attn_mask requires a gradient, which no fused kernel gives on every device",
            "Write this attention out: torch.softmax(q @ k.mT * scale + mask, -1) @ v, or run it by autograd as it is, inside "
            "`with piper.region(opaque=True):`.",
        )
    causal = constant(build, bound, "is_causal", False)
    scale = constant(build, bound, "scale", None)
    gqa = constant(build, bound, "enable_gqa", False)
    swapped = [build.swap(t) for t in (q, k, v)]
    out = build.first(build.call(attention, *swapped, mask, causal, scale, gqa))
    _undo_swaps(build.graph, build.old, out)
    return build.method("transpose", out, 1, 2)


def _undo_swaps(graph: fx.Graph, old: fx.Node, out: fx.Node) -> None:
    """Use the op's own output where the model exchanges heads and positions of the result back."""
    for user in list(old.users):
        if _is_swap(user):
            user.replace_all_uses_with(out)
            graph.erase_node(user)


def _rewrite_layer_norm(build: Builder, bound: Bound) -> fx.Node:
    shape = tuple(constant(build, bound, "normalized_shape", ()))
    eps = constant(build, bound, "eps", 1e-5)
    return build.first(build.call(layer_norm, bound["input"], shape, bound.get("weight"), bound.get("bias"), eps))


def _rewrite_rms_norm(build: Builder, bound: Bound) -> fx.Node:
    shape = tuple(constant(build, bound, "normalized_shape", ()))
    eps = constant(build, bound, "eps", None)
    return build.first(build.call(rms_norm, bound["input"], shape, bound.get("weight"), eps))


def _check_cross_entropy(build: Builder, bound: Bound) -> None:
    if bound.get("weight") is not None:
        raise build.refuse(
            "class weights",
            "Write it out: (w * F.cross_entropy(x, t, reduction='none')).sum() / w.sum() with w = weight[t], or 0 where "
            "t is ignored.",
        )
    if bound.get("size_average") is not None or bound.get("reduce") is not None:
        raise build.refuse("the legacy arguments size_average and reduce", "Say reduction='mean', 'sum' or 'none'.")
    smoothing = constant(build, bound, "label_smoothing", 0.0)
    if smoothing:
        raise build.refuse(
            f"label_smoothing={smoothing}", "Write it out: (1 - s) * F.cross_entropy(x, t) - s * F.log_softmax(x, 1).mean()."
        )
    if build.example(bound["target"]).is_floating_point():
        raise build.refuse("class probabilities as targets", "Write it out: -(t * F.log_softmax(x, 1)).sum(1).mean().")


def _rewrite_cross_entropy(build: Builder, bound: Bound) -> fx.Node:
    """Move classes last and everything else into rows; reduction "none" gets the target's shape back."""
    _check_cross_entropy(build, bound)
    logits, target = bound["input"], bound["target"]
    reduction = constant(build, bound, "reduction", "mean")
    ignore = constant(build, bound, "ignore_index", -100)
    shape = build.example(logits).shape
    kept = tuple(build.example(target).shape[1:])
    if len(shape) != 2:
        # the first dimension is -1 wherever it can be: it holds the rows of a microbatch, which another trace changes
        rows = build.call(torch.movedim, logits, 1, -1) if len(shape) > 2 else logits
        logits = build.method("reshape", rows, -1, shape[min(1, len(shape) - 1)])
        target = build.method("reshape", target, -1)
    loss = build.first(build.call(cross_entropy, logits, target, reduction, ignore))
    if reduction == "none" and len(shape) != 2:
        return build.method("reshape", loss, *((-1, *kept) if len(shape) > 2 else ((),)))
    return loss


Rewrite = Callable[[Builder, Bound], fx.Node]

_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_LAYER_NORM = ("input", "normalized_shape", "weight", "bias", "eps")
_RMS_NORM = ("input", "normalized_shape", "weight", "eps")
_CROSS_ENTROPY = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")

REWRITES: Mapping[object, tuple[tuple[str, ...], Rewrite]] = {
    F.scaled_dot_product_attention: (_ATTENTION, _rewrite_attention),
    torch._C._nn.scaled_dot_product_attention: (_ATTENTION, _rewrite_attention),
    F.layer_norm: (_LAYER_NORM, _rewrite_layer_norm),
    torch.layer_norm: ((*_LAYER_NORM, "cudnn_enable"), _rewrite_layer_norm),
    F.rms_norm: (_RMS_NORM, _rewrite_rms_norm),
    torch.rms_norm: (_RMS_NORM, _rewrite_rms_norm),
    F.cross_entropy: (_CROSS_ENTROPY, _rewrite_cross_entropy),
}
"""The parameters of each call target, by position, and its rewrite. No tensor method is among the targets."""
