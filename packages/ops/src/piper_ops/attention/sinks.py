"""Define piper::attention_with_sinks: attention in which a learned score of each head takes a share, but has no value.

Such a sink (GPT-OSS, arXiv 2508.10925, section 2.3) is one more term of the softmax's denominator. With S the scores,
L their logsumexp and s the sink of the head, the logsumexp with the sink is L' = log(exp L + exp s), and the output is
exp(L - L') times that of attention without sinks. The gradients of attention are made from P = exp(S - L) and the
row-wise sum of dO * O (FlashAttention, arXiv 2205.14135, appendix B.2), so piper::attention_dgrad gives the ones
with sinks if it is given L' and the output with sinks. The gradient of a sink is -exp(s - L') * sum(dO * O).

The op is made of piper::attention, its gradient and torch's own ops, and is no node of a captured graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piper_ops.attention.sdpa import attention, attention_dgrad
from piper_ops.ground.errors import UnsupportedVariant
from piper_ops.ground.library import LIBRARY


class _Attention(torch.autograd.Function):
    """Compute attention with sinks, and the gradients of q, k, v and the sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        window: int,
    ) -> Tensor:
        out, logsumexp = attention(q, k, v, mask, is_causal, scale, enable_gqa, window)
        of_heads = sinks.to(logsumexp.dtype).unsqueeze(-1)
        share = torch.sigmoid(logsumexp - of_heads).transpose(1, 2).unsqueeze(-1)
        result: Tensor = (out * share).to(out.dtype)
        logsumexp = torch.logaddexp(logsumexp, of_heads)
        ctx.options = is_causal, scale, window
        ctx.save_for_backward(q, k, v, sinks, result, logsumexp, mask)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, logsumexp, mask = ctx.saved_tensors
        gq, gk, gv = attention_dgrad(grad, q, k, v, out, logsumexp, mask, *ctx.options)
        grad_sinks = None
        if ctx.needs_input_grad[3]:
            of_heads = sinks.to(logsumexp.dtype).unsqueeze(-1)
            sums = (grad.to(logsumexp.dtype) * out).sum(-1).transpose(1, 2)
            grad_sinks = -(torch.exp(of_heads - logsumexp) * sums).sum((0, 2)).to(sinks.dtype)
        return gq, gk, gv, grad_sinks, *(None,) * 5


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int = 0,
) -> Tensor:
    if sinks.shape != q.shape[2:3] or not sinks.is_floating_point():
        raise UnsupportedVariant(
            f"attention: sinks {tuple(sinks.shape)} of {sinks.dtype} are not one floating-point number for each of the "
            f"{q.shape[2]} heads of queries"
        )
    if mask is not None and mask.requires_grad:
        raise UnsupportedVariant("attention: with sinks, attn_mask has no gradient; detach it")
    result: Tensor = _Attention.apply(q, k, v, sinks, mask, is_causal, scale, enable_gqa, window)  # type: ignore[no-untyped-call]  # torch's is untyped
    return result


LIBRARY.define(
    "attention_with_sinks(Tensor q, Tensor k, Tensor v, Tensor sinks, Tensor? mask=None, bool is_causal=False, "
    "float? scale=None, bool enable_gqa=False, int window=0) -> Tensor"
)
LIBRARY.impl("attention_with_sinks", _attention, "CompositeImplicitAutograd")
attention_with_sinks: torch._ops.OpOverload = torch.ops.piper.attention_with_sinks.default
"""The output of `attention` with sinks [H], one for each head of queries; the other arguments are `attention`'s."""
