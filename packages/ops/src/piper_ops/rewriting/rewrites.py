"""Rewrite each device-dependent call that Dynamo leaves in a graph into a piper op, argument by argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import fx

from piper_ops.ground.library import accumulate_dtype
from piper_ops.pointwise.losses import cross_entropy
from piper_ops.pointwise.norms import layer_norm, rms_norm
from piper_ops.rewriting.attention_calls import ATTENTION, rewrite_attention
from piper_ops.rewriting.builder import Bound, Builder, constant


def _rewrite_layer_norm(build: Builder, bound: Bound) -> fx.Node:
    shape = tuple(constant(build, bound, "normalized_shape", ()))
    eps = constant(build, bound, "eps", 1e-5)
    return build.first(
        build.call(layer_norm, bound["input"], shape, bound.get("weight"), bound.get("bias"), eps)
    )


def _rewrite_rms_norm(build: Builder, bound: Bound) -> fx.Node:
    shape = tuple(constant(build, bound, "normalized_shape", ()))
    eps = constant(build, bound, "eps", None)
    return build.first(build.call(rms_norm, bound["input"], shape, bound.get("weight"), eps))


def _rewrite_instance_norm(build: Builder, bound: Bound) -> fx.Node:
    """Call group_norm with a group for each channel: an instance norm without running averages is just that."""
    x = bound["input"]
    eps = constant(build, bound, "eps", 1e-5)
    return build.call(
        F.group_norm, x, build.example(x).shape[1], bound.get("weight"), bound.get("bias"), eps
    )


def _rewrite_cross_entropy(build: Builder, bound: Bound) -> fx.Node:
    """Call the fused loss if it covers the arguments, else torch's loss with logits in the dtype of a loss."""
    if bound.get("size_average") is not None or bound.get("reduce") is not None:
        raise build.refuse(
            "the legacy arguments size_average and reduce", "Say reduction='mean', 'sum' or 'none'."
        )
    smoothing, weight = constant(build, bound, "label_smoothing", 0.0), bound.get("weight")
    if weight is None and not smoothing and not build.example(bound["target"]).is_floating_point():
        return _fused_cross_entropy(build, bound)
    logits = build.example(bound["input"])
    if weight is not None and build.example(weight).dtype != logits.dtype:
        both = f"class weights of {build.example(weight).dtype} beside logits of {logits.dtype}"
        raise build.refuse(both, "Cast them where they meet: weight.to(logits.dtype).")
    wide = build.method("to", bound["input"], accumulate_dtype(logits.dtype))
    weight = None if weight is None else build.method("to", weight, accumulate_dtype(logits.dtype))
    reduction, ignored = (
        constant(build, bound, "reduction", "mean"),
        constant(build, bound, "ignore_index", -100),
    )
    return build.call(
        F.cross_entropy, wide, bound["target"], weight, None, ignored, None, reduction, smoothing
    )


def _fused_cross_entropy(build: Builder, bound: Bound) -> fx.Node:
    """Move classes last and everything else into rows; reduction "none" gets the target's shape back."""
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


_NORMALISED = ("use_input_stats", "momentum", "eps")
_INSTANCE_NORM = ("input", "running_mean", "running_var", "weight", "bias", *_NORMALISED)
_TORCH_INSTANCE_NORM = (
    "input",
    "weight",
    "bias",
    "running_mean",
    "running_var",
    *_NORMALISED,
    "cudnn_enabled",
)

Rewrite = Callable[[Builder, Bound], fx.Node]

_LAYER_NORM = ("input", "normalized_shape", "weight", "bias", "eps")
_RMS_NORM = ("input", "normalized_shape", "weight", "eps")
_CROSS_ENTROPY = (
    "input",
    "target",
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
    "label_smoothing",
)

REWRITES: Mapping[object, tuple[tuple[str, ...], Rewrite]] = {
    F.scaled_dot_product_attention: (ATTENTION, rewrite_attention),
    torch._C._nn.scaled_dot_product_attention: (ATTENTION, rewrite_attention),
    F.layer_norm: (_LAYER_NORM, _rewrite_layer_norm),
    torch.layer_norm: ((*_LAYER_NORM, "cudnn_enable"), _rewrite_layer_norm),
    F.rms_norm: (_RMS_NORM, _rewrite_rms_norm),
    torch.rms_norm: (_RMS_NORM, _rewrite_rms_norm),
    F.instance_norm: (_INSTANCE_NORM, _rewrite_instance_norm),
    torch.instance_norm: (_TORCH_INSTANCE_NORM, _rewrite_instance_norm),
    F.cross_entropy: (_CROSS_ENTROPY, _rewrite_cross_entropy),
}
"""The parameters of each call target, by position, and its rewrite. No tensor method is among the targets."""
