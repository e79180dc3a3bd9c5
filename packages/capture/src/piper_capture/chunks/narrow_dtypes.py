"""Find where a captured model computes in a narrower floating-point type than its parameters have."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from piper_capture.trace.dynamo import Forward
from piper_capture.values.concrete import line_of, tensors_of
from piper_ops import dtype_name


@dataclass(frozen=True)
class Narrow:
    """Hold a dtype by torch's name, and the user's line that first computes in it."""

    dtype: str
    line: str


def narrowest(forward: Forward) -> Narrow | None:
    """Return the narrowest floating-point type below float64 that the model or its loss computes in, or None."""
    candidates = [
        (tensor.dtype, node)
        for node in forward.graph.nodes
        if node.op.startswith("call") and node.users
        for tensor in tensors_of(node)
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize < torch.float64.itemsize
    ]
    if not candidates:
        return None
    # Of two types with as many bytes the one that keeps fewer digits.
    dtype, node = min(candidates, key=lambda item: (item[0].itemsize, -torch.finfo(item[0]).eps))
    return Narrow(dtype_name(dtype), line_of(node))
