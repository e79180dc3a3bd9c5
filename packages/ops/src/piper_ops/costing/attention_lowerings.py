"""Say which kernels the calls of attention in a program take, on a CPU and on CUDA devices, and which a CPU lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from piper_ops.attention import sdpa
from piper_ops.attention.lowering import LoweringName, attention_lowering
from piper_ops.costing.costs import call_of
from piper_ops.costing.registry import Call
from piper_ops.float8.products import float8_mm
from piper_ops.float8.quantise import float8_cast, float8_scale
from piper_ops.ground.library import HALF
from piper_ops.pointwise.norms import LAYER_NORMS

CAPABILITIES = ((8, 0), (9, 0))
"""The compute capabilities whose lowerings are compared; later devices choose as one of these does."""


def is_written_on_cpu(
    op: object,
    args_meta: Sequence[Any],
    out_meta: Any,
    kwargs_meta: Mapping[str, Any] | None = None,
) -> bool:
    """Return whether a CPU computes an op written out, where every CUDA device has a kernel for it.

    That is attention with a mask, everything in float8, and layer norms in half precision, which take float32 weights.
    """
    if op in (float8_scale, float8_cast, float8_mm):
        return True
    if op in LAYER_NORMS:
        return call_of(op, args_meta, out_meta, kwargs_meta or {}).tensor("x").dtype in HALF
    if op not in (sdpa.attention, sdpa.attention_dgrad):
        return False
    call = call_of(op, args_meta, out_meta, kwargs_meta or {})
    mask, causal = call.args["mask"] is not None, call.args["is_causal"]
    here = attention_lowering("cpu", *taken_shapes(call), masked=mask, is_causal=causal)
    return here.fallback and "math" not in cuda_lowerings(call)


def taken_shapes(call: Call) -> tuple[torch.dtype, torch.Size, torch.Size, torch.Size]:
    """Return the dtype and the shapes of q, k and v of a call of attention."""
    q, k, v = (call.tensor(name) for name in "qkv")
    return q.dtype, q.shape, k.shape, v.shape


def cuda_lowerings(call: Call) -> set[LoweringName]:
    """Return the lowerings that a call of attention takes on CUDA devices of any capability."""
    mask, causal = call.args["mask"] is not None, call.args["is_causal"]
    return {
        attention_lowering(
            "cuda", *taken_shapes(call), masked=mask, is_causal=causal, capability=c
        ).name
        for c in CAPABILITIES
    }
