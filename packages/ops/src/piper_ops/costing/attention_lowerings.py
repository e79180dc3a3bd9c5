"""Say which kernels the calls of attention in a program take, on a CPU and on CUDA devices, and which a CPU lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from piper_ops.attention import sdpa
from piper_ops.attention.lowering import Lowering, LoweringName, attention_lowering
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
    return lowering_of(call, "cpu").fallback and "math" not in cuda_lowerings(call)


def lowering_of(call: Call, device: str, capability: tuple[int, int] = (8, 0)) -> Lowering:
    """Return the lowering that a call of attention takes on a device."""
    q, k, v = (call.tensor(name) for name in "qkv")
    return attention_lowering(
        device,
        q.dtype,
        q.shape,
        k.shape,
        v.shape,
        masked=call.args["mask"] is not None,
        is_causal=call.args["is_causal"],
        windowed=call.args["window"] > 0,
        capability=capability,
    )


def cuda_lowerings(call: Call) -> set[LoweringName]:
    """Return the lowerings that a call of attention takes on CUDA devices of any capability."""
    return {lowering_of(call, "cuda", capability).name for capability in CAPABILITIES}
