"""Rewrite each device-dependent call that Dynamo leaves in a graph into a piper op, argument by argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import fx

from piper_ops.attention_calls import ATTENTION, rewrite_attention
from piper_ops.builder import Bound, Builder, constant
from piper_ops.losses import cross_entropy
from piper_ops.norms import layer_norm, rms_norm


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

_LAYER_NORM = ("input", "normalized_shape", "weight", "bias", "eps")
_RMS_NORM = ("input", "normalized_shape", "weight", "eps")
_CROSS_ENTROPY = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")

REWRITES: Mapping[object, tuple[tuple[str, ...], Rewrite]] = {
    F.scaled_dot_product_attention: (ATTENTION, rewrite_attention),
    torch._C._nn.scaled_dot_product_attention: (ATTENTION, rewrite_attention),
    F.layer_norm: (_LAYER_NORM, _rewrite_layer_norm),
    torch.layer_norm: ((*_LAYER_NORM, "cudnn_enable"), _rewrite_layer_norm),
    F.rms_norm: (_RMS_NORM, _rewrite_rms_norm),
    torch.rms_norm: (_RMS_NORM, _rewrite_rms_norm),
    F.cross_entropy: (_CROSS_ENTROPY, _rewrite_cross_entropy),
}
"""The parameters of each call target, by position, and its rewrite. No tensor method is among the targets."""
