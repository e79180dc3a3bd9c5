"""Write the norms and the loss of this package as ops that Inductor fuses with their neighbours.

Each function takes the arguments of its op and returns results with the same shapes, dtypes and contiguous strides. The
arithmetic is in the dtype of the kernels: float64 for float64, else float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from piper_ops.ground.library import accumulate_dtype
from piper_ops.pointwise.losses import cross_entropy, cross_entropy_dgrad
from piper_ops.pointwise.norms import (
    layer_norm,
    layer_norm_backward,
    layer_norm_dgrad,
    layer_norm_wgrad,
    rms_norm,
    rms_norm_dgrad,
    rms_norm_wgrad,
)


def _dims(x: Tensor, shape: Sequence[int]) -> list[int]:
    return list(range(x.dim() - len(shape), x.dim()))


def _leading(x: Tensor, shape: Sequence[int]) -> list[int]:
    return list(range(x.dim() - len(shape)))


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulate_dtype(x.dtype))


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).contiguous()


def _summed(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    leading = _leading(x, shape)
    return _as(x.sum(leading) if leading else x, dtype)


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    wide = _wide(x)
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    rstd = (wide.square().mean(_dims(x, shape), keepdim=True) + eps).rsqrt()
    normalised = wide * rstd
    return _as(normalised if weight is None else normalised * weight, x.dtype), rstd.contiguous()


def _rms_norm_dgrad(
    grad_out: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None
) -> Tensor:
    grad, wide = grad_out.to(rstd.dtype), x.to(rstd.dtype)
    grad = grad if weight is None else grad * weight
    inner = (grad * wide).mean(_dims(x, shape), keepdim=True) * rstd * rstd
    return _as((grad - wide * inner) * rstd, x.dtype)


def _rms_norm_wgrad(
    grad_out: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, dtype: torch.dtype
) -> Tensor:
    return _summed(x.to(rstd.dtype) * rstd * grad_out, shape, dtype)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide, dims = _wide(x), _dims(x, shape)
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    rstd = (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    out = centred * rstd
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return _as(out, x.dtype), mean.contiguous(), rstd.contiguous()


def _layer_norm_dgrad(
    grad_out: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
) -> Tensor:
    dims = _dims(x, shape)
    normalised = (x.to(mean.dtype) - mean) * rstd
    grad = grad_out.to(mean.dtype)
    grad = grad if weight is None else grad * weight
    along = (grad * normalised).mean(dims, keepdim=True)
    return _as((grad - grad.mean(dims, keepdim=True) - normalised * along) * rstd, x.dtype)


def _layer_norm_wgrad(
    grad_out: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    dtype: torch.dtype,
    mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    grad = grad_out.to(mean.dtype)
    weight_wanted, bias_wanted = mask
    normalised = (x.to(mean.dtype) - mean) * rstd
    return (
        _summed(grad * normalised, shape, dtype) if weight_wanted else x.new_empty(0, dtype=dtype),
        _summed(grad, shape, dtype) if bias_wanted else x.new_empty(0, dtype=dtype),
    )


def _layer_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    of_params = _layer_norm_wgrad(grad_out, x, shape, mean, rstd, x.dtype, mask)
    return (_layer_norm_dgrad(grad_out, x, shape, mean, rstd, weight), *of_params)


def _cross_entropy(
    logits: Tensor, target: Tensor, reduction: str = "mean", ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    wide = _wide(logits)
    highest = wide.amax(1, keepdim=True)
    logsumexp = ((wide - highest).exp().sum(1, keepdim=True).log() + highest).squeeze(1)
    counts = target != ignore_index
    chosen = wide.gather(1, torch.where(counts, target, 0).unsqueeze(1)).squeeze(1)
    loss = torch.where(counts, logsumexp - chosen, 0.0)
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / counts.sum()
    return loss.contiguous(), logsumexp.contiguous()


def _cross_entropy_dgrad(
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    logsumexp: Tensor,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    counts = target != ignore_index
    scale = grad_loss / counts.sum() if reduction == "mean" else grad_loss
    scale = torch.where(counts, scale, 0.0).unsqueeze(1)
    probabilities = (logits.to(logsumexp.dtype) - logsumexp.unsqueeze(1)).exp()
    classes = torch.arange(logits.shape[1], device=logits.device)
    hit = classes == target.unsqueeze(1)
    return _as((probabilities - hit.to(probabilities.dtype)) * scale, logits.dtype)


DECOMPOSITIONS: Mapping[torch._ops.OpOverload, Callable[..., Any]] = {
    rms_norm: _rms_norm,
    rms_norm_dgrad: _rms_norm_dgrad,
    rms_norm_wgrad: _rms_norm_wgrad,
    layer_norm: _layer_norm,
    layer_norm_dgrad: _layer_norm_dgrad,
    layer_norm_wgrad: _layer_norm_wgrad,
    layer_norm_backward: _layer_norm_backward,
    cross_entropy: _cross_entropy,
    cross_entropy_dgrad: _cross_entropy_dgrad,
}
"""The ops of this package that can be a part of a fused group, each with its form in torch's ops."""
