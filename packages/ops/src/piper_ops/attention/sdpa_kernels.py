"""Hold the kernels behind piper::attention and piper::attention_dgrad, one pair per lowering.

Kernels take q, k, v and their gradients as [batch, heads, T, head_dim], as aten does, with the last dimension
contiguous; a mask is additive, of 2 or 4 dimensions. Pairs return (out, logsumexp [batch, heads, T_q]) and (grad_q,
grad_k, grad_v), in whatever layout the kernel has. The CUDA pairs were run on an H200
(packages/ops/tests/test_ops_on_cuda.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from piper_ops.attention.lowering import LoweringName
from piper_ops.ground.library import HALF, accumulate_dtype

aten = torch.ops.aten
_cpu_flash = aten._scaled_dot_product_flash_attention_for_cpu.default
_cpu_flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

LSE_ALIGNMENT = 32
"""The multiple at which the efficient kernel stores rows of its logsumexp (kAlignLSE in aten's mem_eff_attention)."""
BIAS_ALIGNMENT = 16
"""The multiple at which rows of the efficient kernel's bias start (pad_bias in aten's attention.cpp)."""


class AttentionInputs(NamedTuple):
    """Hold the tensors and options of an attention call.

    Attributes:
        q: the queries.
        k: the keys.
        v: the values.
        mask: says which keys a query attends to.
        is_causal: whether query i attends to keys 0..i only.
        scale: the factor of q k^T; None for head_dim ** -0.5.
        window: with a causal one, the keys that a query attends to, its own the last; 0 for all before it.
        place: the device's number among the ones that share the tokens of queries.
        degree: the number of these devices.
        order: of their tokens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    window: int = 0
    place: int = 0
    degree: int = 1
    order: str = ""

    @property
    def factor(self) -> float:
        return float(self.q.shape[-1]) ** -0.5 if self.scale is None else self.scale

    def with_repeated_heads(self) -> AttentionInputs:
        """Return the inputs with a head of keys and values for each head of queries."""
        group = self.q.shape[1] // self.k.shape[1]
        if group == 1:
            return self
        k, v = self.k.repeat_interleave(group, 1), self.v.repeat_interleave(group, 1)
        return self._replace(k=k, v=v)


Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]
ForwardKernel = Callable[[AttentionInputs], Pair]
BackwardKernel = Callable[[Tensor, Tensor, Tensor, AttentionInputs], Triple]
"""A function of the output's gradient, the output, its logsumexp and the inputs."""


def cpu_flash(given: AttentionInputs) -> Pair:
    """Run torch's flash attention for CPU: any float dtype, with or without a mask."""
    q, k, v, mask, is_causal, *_ = given
    output, lse = _cpu_flash(
        q, k, v, 0.0, is_causal, attn_mask=cpu_mask(mask, q), scale=given.factor
    )
    return output, lse


def cpu_flash_dgrad(grad: Tensor, out: Tensor, lse: Tensor, given: AttentionInputs) -> Triple:
    """Run the backward of `cpu_flash`."""
    q, k, v, mask, is_causal, *_ = given
    mask = cpu_mask(mask, q)
    grads: Triple = _cpu_flash_backward(
        grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=given.factor
    )
    return grads


def cpu_mask(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return an additive mask of q's dtype, or a float32 one beside half precision."""
    if mask is None or mask.dtype == q.dtype or (mask.dtype == torch.float32 and q.dtype in HALF):
        return mask
    return mask.to(q.dtype)


def cuda_flash(given: AttentionInputs) -> Pair:
    """Run FlashAttention-2 as aten ships it: half precision, no mask.

    Its op with a window takes tokens before heads, and lets the last query attend to the last key.
    """
    if given.window:
        q, k, v = (t.transpose(1, 2) for t in given[:3])
        sizes, sides = (None, None, q.shape[1], k.shape[1]), _window_sides(given)
        output, lse = aten._flash_attention_forward(
            q, k, v, *sizes, 0.0, True, False, scale=given.factor, **sides
        )[:2]
        return output.transpose(1, 2), lse
    output, lse = aten._scaled_dot_product_flash_attention(
        given.q, given.k, given.v, 0.0, given.is_causal, False, scale=given.factor
    )[:2]
    return output, lse


def cuda_flash_dgrad(grad: Tensor, out: Tensor, lse: Tensor, given: AttentionInputs) -> Triple:
    """Run the backward of `cuda_flash`."""
    q, k, v, _, is_causal, *_ = given
    # without dropout these are not read
    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ()))
    if given.window:
        tensors = (t.transpose(1, 2) for t in (grad, q, k, v, out))
        sizes, sides = (None, None, q.shape[2], k.shape[2]), _window_sides(given)
        of_window: Triple = aten._flash_attention_backward(
            *tensors, lse, *sizes, 0.0, True, seed, offset, scale=given.factor, **sides
        )
        gq, gk, gv = (t.transpose(1, 2) for t in of_window)
        return gq, gk, gv
    grads: Triple = aten._scaled_dot_product_flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        is_causal,
        seed,
        offset,
        scale=given.factor,
    )
    return grads


def _window_sides(given: AttentionInputs) -> dict[str, int]:
    """Return how many keys before and behind its own a query attends to, as aten's flash attention takes it."""
    return {"window_size_left": given.window - 1, "window_size_right": 0}


def cuda_cudnn(given: AttentionInputs) -> Pair:
    """Run cuDNN's fused attention: half precision, no mask, no grouped heads."""
    output, lse = aten._scaled_dot_product_cudnn_attention(
        given.q, given.k, given.v, None, True, 0.0, given.is_causal, False, scale=given.factor
    )[:2]
    return output, lse.reshape(given.q.shape[:3])


def cuda_cudnn_dgrad(grad: Tensor, out: Tensor, lse: Tensor, given: AttentionInputs) -> Triple:
    """Run the backward of `cuda_cudnn`."""
    q, k, v, _, is_causal, *_ = given
    seed, offset = (
        torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2)
    )  # unread without dropout
    lengths = (q.shape[2], k.shape[2])
    grads: Triple = aten._scaled_dot_product_cudnn_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse.unsqueeze(-1),
        seed,
        offset,
        None,
        None,
        None,
        *lengths,
        0.0,
        is_causal,
        scale=given.factor,
    )
    return grads


def cuda_efficient(given: AttentionInputs) -> Pair:
    """Run aten's memory-efficient attention: with a mask as bias; grouped heads are repeated."""
    given = given.with_repeated_heads()
    q, k, v, mask, is_causal, *_ = given
    output, lse = aten._scaled_dot_product_efficient_attention(
        q, k, v, aligned_bias(q, k, mask), True, 0.0, is_causal, scale=given.factor
    )[:2]
    return output, lse[..., : q.shape[2]]


def cuda_efficient_dgrad(grad: Tensor, out: Tensor, lse: Tensor, given: AttentionInputs) -> Triple:
    """Run the backward of `cuda_efficient`; gradients of repeated heads are summed."""
    kv_heads = given.k.shape[1]
    given = given.with_repeated_heads()
    q, k, v, mask, is_causal, *_ = given
    bias = aligned_bias(q, k, mask)
    # padding rows must give exp(score - lse) = 0
    lse = torch.nn.functional.pad(lse, (0, -q.shape[2] % LSE_ALIGNMENT), value=float("inf"))
    seed, offset = (
        torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2)
    )  # unread without dropout
    gq, gk, gv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad,
        q,
        k,
        v,
        bias,
        out,
        lse,
        seed,
        offset,
        0.0,
        [True, True, True, False],
        is_causal,
        scale=given.factor,
    )
    return gq, _sum_groups(gk, kv_heads), _sum_groups(gv, kv_heads)


def aligned_bias(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return an additive mask as the efficient kernel takes it, copied so that its rows start at aligned elements."""
    if mask is None:
        return None
    keys = k.shape[2]
    full = mask.to(q.dtype).expand(*mask.shape[:-1], keys)
    padded = torch.nn.functional.pad(full, (0, -keys % BIAS_ALIGNMENT))[..., :keys]
    return padded.expand(q.shape[0], q.shape[1], q.shape[2], keys)


def math(given: AttentionInputs) -> Pair:
    """Compute softmax(q k^T scale + mask) v in float32 (float64 for float64), with T_q x T_k matrices in memory."""
    given = given.with_repeated_heads()
    scores = _scores(given)
    lse = scores.logsumexp(-1)
    output = _probabilities(scores, lse) @ given.v.to(scores.dtype)
    return output.to(given.q.dtype), lse


def math_dgrad(grad: Tensor, out: Tensor, lse: Tensor, given: AttentionInputs) -> Triple:
    """Compute dS = P * (dO v^T - rowsum(dO * O)), as in FlashAttention (arXiv 2205.14135, appendix B.2)."""
    kv_heads = given.k.shape[1]
    given = given.with_repeated_heads()
    p = _probabilities(_scores(given), lse)
    q, k, v, *_ = given
    grad, out, kf, vf, qf = (t.to(p.dtype) for t in (grad, out, k, v, q))
    gv = p.mT @ grad
    row = (grad * out).sum(-1, keepdim=True)
    ds = (grad @ vf.mT).sub_(row).mul_(p).mul_(given.factor)
    gk = ds.mT @ qf
    grads = (ds @ kf, _sum_groups(gk, kv_heads), _sum_groups(gv, kv_heads))
    return grads[0].to(q.dtype), grads[1].to(k.dtype), grads[2].to(v.dtype)


def _scores(given: AttentionInputs) -> Tensor:
    dtype = accumulate_dtype(given.q.dtype)
    scores = (given.q.to(dtype) @ given.k.to(dtype).mT).mul_(given.factor)
    if given.mask is not None:
        scores.add_(given.mask)
    if given.is_causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(above, float("-inf"))
    return scores


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    # a row that is masked whole attends to nothing: its logsumexp is -inf, its output 0 as in torch's safe softmax
    finite = lse.masked_fill(lse == float("-inf"), 0.0)
    return (scores - finite.unsqueeze(-1)).exp_()


def _sum_groups(grad: Tensor, kv_heads: int) -> Tensor:
    return grad if grad.shape[1] == kv_heads else grad.unflatten(1, (kv_heads, -1)).sum(2)


KERNELS: dict[LoweringName, tuple[ForwardKernel, BackwardKernel]] = {
    "cpu_flash": (cpu_flash, cpu_flash_dgrad),
    "cuda_cudnn": (cuda_cudnn, cuda_cudnn_dgrad),
    "cuda_flash": (cuda_flash, cuda_flash_dgrad),
    "cuda_efficient": (cuda_efficient, cuda_efficient_dgrad),
    "math": (math, math_dgrad),
}
