"""Rewrite batch norms with statistics of the microbatch into operations that every device computes alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from piper_ops.rewriting.builder import Bound, Builder, constant, user_line

STATISTICS = "piper_statistics"
"""The key of the meta of operations that take the statistics of a microbatch by the user's own word."""
BATCH_NORMS: Mapping[object, tuple[str, ...]] = {
    F.batch_norm: (
        "input",
        "running_mean",
        "running_var",
        "weight",
        "bias",
        "training",
        "momentum",
        "eps",
    ),
    torch.batch_norm: (
        "input",
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "training",
        "momentum",
        "eps",
        "cudnn_enabled",
    ),
}
"""The calls that may be rewritten, with their parameters by position."""


@dataclass(frozen=True)
class BatchNorm:
    """Describe a batch norm that was rewritten.

    Attributes:
        line: the user's line.
        single: whether a microbatch of one row has one value per channel, which has no variance.
    """

    line: str
    single: bool


def uses_batch(bound: Bound) -> bool:
    """Return whether a call of batch_norm takes its statistics from the batch, and not from running averages."""
    return bound.get("training", False) is not False or bound.get("running_mean") is None


def described(node: fx.Node, bound: Bound) -> BatchNorm:
    """Return the record of a batch norm."""
    shape = bound["input"].meta["example_value"].shape
    inner = [n for n in shape[2:] if n != 1]
    return BatchNorm(user_line(node), not inner and str(shape[0]).isidentifier())


def rewrite_batch_norm(build: Builder, bound: Bound) -> fx.Node:
    """Return the normalised input, from the mean and the variance of each channel; update the running averages.

    Statistics are float32 at least. Backward needs the centred input and numbers per channel.
    """
    build.old.meta[STATISTICS] = True  # which all operations in its place inherit
    input_example = build.example(bound["input"])
    dims = [d for d in range(input_example.dim()) if d != 1]
    narrow = input_example.dtype in (torch.bfloat16, torch.float16)
    x = build.method("float", bound["input"]) if narrow else bound["input"]
    mean = build.call(torch.mean, x, dims, True)
    centred = build.call(torch.sub, x, mean)
    variance = build.call(torch.mean, build.call(torch.mul, centred, centred), dims, True)
    scale = build.call(
        torch.rsqrt, build.call(torch.add, variance, constant(build, bound, "eps", 1e-5))
    )
    if bound.get("weight") is not None:
        scale = build.call(torch.mul, scale, _channels(build, bound["weight"], input_example))
    normalised = build.call(torch.mul, centred, scale)
    if bound.get("bias") is not None:
        normalised = build.call(
            torch.add, normalised, _channels(build, bound["bias"], input_example)
        )
    if bound.get("running_mean") is not None:
        momentum = constant(build, bound, "momentum", 0.1)
        _average(build, bound["running_mean"], mean, momentum)
        unbiased = build.call(torch.var, build.method("detach", centred), dims, True, True)
        _average(build, bound["running_var"], unbiased, momentum)
    return build.method("to", normalised, input_example.dtype) if narrow else normalised


def _channels(build: Builder, of: fx.Node, given: Tensor) -> fx.Node:
    """Return a tensor with a number per channel in a shape that fits the input."""
    return build.method("view", of, *(-1 if d == 1 else 1 for d in range(given.dim())))


def _average(build: Builder, running: fx.Node, found: fx.Node, momentum: Any) -> None:
    """Update a running average with the statistics found."""
    running_example = build.example(running)
    flat = build.method(
        "to", build.method("reshape", build.method("detach", found), -1), running_example.dtype
    )
    build.method(
        "add_", build.method("mul_", running, 1 - momentum), build.call(torch.mul, flat, momentum)
    )
