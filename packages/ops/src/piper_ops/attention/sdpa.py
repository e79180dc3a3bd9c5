"""Define piper::attention and piper::attention_dgrad: scaled dot product attention that keeps no T x T matrix.

The ops take and return [batch, T, heads, head_dim]. Fused kernels write in this layout, and the rest of a transformer
block uses it: the output projection reads `out` itself, so one tensor is saved for it and for the backward, not two.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from piper_ops.attention.lowering import attention_lowering
from piper_ops.attention.sdpa_kernels import (
    KERNELS,
    AttentionInputs,
    BackwardKernel,
    ForwardKernel,
)
from piper_ops.attention.windows import in_window
from piper_ops.ground.errors import UnsupportedVariant
from piper_ops.ground.library import FLOATS, accumulate_dtype, contiguous_empty, define


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    _: object = None,
    gqa: bool = False,
    window: int = 0,
    place: int = 0,
    degree: int = 1,
    order: str = "",
) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise UnsupportedVariant(
            f"attention: {shapes} are not all 4-dimensional, as [batch, T, heads, head_dim]"
        )
    if q.dtype not in FLOATS or not q.dtype == k.dtype == v.dtype:
        raise UnsupportedVariant(
            f"attention: dtypes {q.dtype}, {k.dtype}, {v.dtype} are not one floating-point dtype"
        )
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise UnsupportedVariant(
            f"attention: {shapes} do not match (batch sizes must be equal, none is broadcast)"
        )
    if q.shape[2] != k.shape[2] and (not gqa or q.shape[2] % k.shape[2]):
        raise UnsupportedVariant(
            f"attention: {q.shape[2]} query heads and {k.shape[2]} key heads need enable_gqa and a whole ratio"
        )
    if mask is not None:
        _check_mask(q, k, mask, is_causal)
    if window and (window < 0 or not is_causal or q.shape[1] * degree != k.shape[1]):
        raise UnsupportedVariant(
            f"attention: a window of {window} needs is_causal and as many keys as queries, and is at least 1"
        )


def _check_mask(q: Tensor, k: Tensor, mask: Tensor, is_causal: bool) -> None:
    if is_causal:
        raise UnsupportedVariant(
            "attention: attn_mask together with is_causal; put the causal part into the mask"
        )
    if mask.dtype not in (torch.bool, torch.float32, q.dtype):
        raise UnsupportedVariant(
            f"attention: attn_mask of {mask.dtype} is neither bool nor float32 nor {q.dtype}"
        )
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if not 2 <= mask.dim() <= 4 or any(
        m not in (1, f) for m, f in zip(mask.shape[::-1], full[::-1], strict=False)
    ):
        raise UnsupportedVariant(
            f"attention: attn_mask {tuple(mask.shape)} does not broadcast to (B, H, T_q, T_k) = {full}"
        )


def additive(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return a mask in the form that the kernels take: a bool mask becomes a float one, without another temporary."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.full(mask.shape, float("-inf"), dtype=q.dtype, device=q.device).masked_fill_(
            mask, 0.0
        )
    return mask.unsqueeze(0) if mask.dim() == 3 else mask


def _kernels(given: AttentionInputs) -> tuple[ForwardKernel, BackwardKernel]:
    q, k, v, mask, is_causal, _, window, *_ = given
    masked, windowed = mask is not None, window > 0
    return _chosen(q.device, q.dtype, q.shape, k.shape, v.shape, masked, is_causal, windowed)


@lru_cache(maxsize=256)
def _chosen(
    device: torch.device,
    dtype: torch.dtype,
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    masked: bool,
    causal: bool,
    windowed: bool,
) -> tuple[ForwardKernel, BackwardKernel]:
    """Return the kernels of a call, remembered because choosing costs the host more than a small kernel does."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    name = attention_lowering(
        device.type,
        dtype,
        q,
        k,
        v,
        masked=masked,
        is_causal=causal,
        windowed=windowed,
        capability=capability,
    ).name
    return in_window(name, *KERNELS[name]) if windowed else KERNELS[name]


def _heads_first(tensor: Tensor) -> Tensor:
    # the fused kernels read rows of the last dimension without looking at its stride
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return tensor.transpose(1, 2)


def _for_kernel(given: AttentionInputs, mask: Tensor | None) -> AttentionInputs:
    """Return the inputs of a call as its kernel takes them, with an additive mask."""
    q, k, v = (_heads_first(t) for t in (given.q, given.k, given.v))
    return given._replace(q=q, k=k, v=v, mask=mask)


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    _check(q, k, v, *options)
    batch, queries, heads, _ = q.shape
    output = contiguous_empty(q, (batch, queries, heads, v.shape[-1]))
    return output, contiguous_empty(q, (batch, heads, queries), accumulate_dtype(q.dtype))


def _attention_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    _: bool = False,
    *window: Any,
) -> tuple[Tensor, Tensor]:
    given = AttentionInputs(q, k, v, mask, is_causal, scale, *window)
    return run_forward(_kernels(given)[0], given)


def run_forward(forward: ForwardKernel, given: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Run piper::attention by one of `sdpa_kernels.KERNELS`."""
    mask = additive(given.mask, given.q)
    out, lse = forward(_for_kernel(given, mask))
    lse = lse.contiguous()  # first: its other copy is gone before `out` may be copied
    return out.transpose(1, 2).contiguous(), lse


def _dgrad_fake(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return contiguous_empty(q, q.shape), contiguous_empty(k, k.shape), contiguous_empty(v, v.shape)


def _dgrad_kernel(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *window: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    given = AttentionInputs(q, k, v, mask, is_causal, scale, *window)
    return run_backward(_kernels(given)[1], grad_out, out, logsumexp, given)


def run_backward(
    backward: BackwardKernel,
    grad_out: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    given: AttentionInputs,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run piper::attention_dgrad by one of `sdpa_kernels.KERNELS`."""
    mask = additive(given.mask, given.q)
    grad, given = _heads_first(grad_out.contiguous()), _for_kernel(given, mask)
    out = _heads_first(out.contiguous())
    gq, gk, gv = (
        g.transpose(1, 2).contiguous() for g in backward(grad, out, logsumexp.contiguous(), given)
    )
    return gq, gk, gv


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.is_causal, ctx.scale, _, *ctx.window = inputs
    if mask is not None and mask.requires_grad:
        raise UnsupportedVariant(
            "attention: attn_mask requires a gradient, which no fused kernel gives on every device; write this "
            "attention out with matmul and softmax"
        )
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, mask)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 11
    q, k, v, out, lse, mask = ctx.saved_tensors
    options = mask, ctx.is_causal, ctx.scale, *ctx.window
    return *attention_dgrad(grad_out, q, k, v, out, lse, *options), *(None,) * 8


_WINDOW = 'int window=0, int place=0, int degree=1, str order=""'

attention_dgrad = define(
    "attention_dgrad",
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor? mask=None, bool "
    f"is_causal=False, float? scale=None, {_WINDOW}) -> (Tensor, Tensor, Tensor)",
    _dgrad_fake,
    _dgrad_kernel,
    direct=True,
)
"""An op that returns the gradients of q, k and v, each in the shape of its tensor and contiguous."""

attention = define(
    "attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask=None, bool is_causal=False, float? scale=None, bool "
    f"enable_gqa=False, {_WINDOW}) -> (Tensor, Tensor)",
    _attention_fake,
    _attention_kernel,
    check=_check,
    direct=True,
    backward=_backward,
    setup_context=_setup_context,
)
"""An op that takes q [B, T_q, H, D], k [B, T_k, H_k, D] and v [B, T_k, H_k, D_v] with any strides.

It returns (out [B, T_q, H, D_v] contiguous, logsumexp [B, H, T_q] in float32 or float64). The mask (bool with True for
"attend", or additive) broadcasts to [B, H, T_q, T_k] and has no gradient. The scale is D ** -0.5 by default. enable_gqa
allows H to be a multiple of H_k. A causal call may have a window of so many keys, a query's own the last. Then
devices may share the tokens of queries, `degree` of them, in an order of `piper_ops.attention.context`; they have all
keys. Raises UnsupportedVariant.
"""
