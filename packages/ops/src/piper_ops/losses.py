"""piper::cross_entropy and piper::cross_entropy_dgrad: saves logits and one logsumexp per row, not a log-softmax.

The kernels work through the rows in slices, so that beside logits and gradient little is live.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from piper_ops.errors import UnsupportedVariant
from piper_ops.library import FLOATS, accumulate_dtype, contiguous_empty, define

SLICE_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
"""Logits per slice: 1 MiB of float32, which stays in a core's cache (a third of the time of 16 MiB, measured), or 64 MiB, which
fills a GPU (not yet measured)."""

REDUCTIONS = ("mean", "sum", "none")


def _check(logits: Tensor, target: Tensor, reduction: str) -> None:
    if logits.dim() != 2 or tuple(target.shape) != tuple(logits.shape[:1]):
        raise UnsupportedVariant(
            f"cross_entropy: logits {tuple(logits.shape)} and target {tuple(target.shape)} are not (N, C) and (N,)"
        )
    if logits.dtype not in FLOATS or target.dtype != torch.int64:
        raise UnsupportedVariant(
            f"cross_entropy: logits of {logits.dtype} and target of {target.dtype} are not floating-point and int64"
        )
    if reduction not in REDUCTIONS:
        raise UnsupportedVariant(f"cross_entropy: reduction {reduction!r}; accepted are {', '.join(REDUCTIONS)}")


def _slices(logits: Tensor) -> Iterator[slice]:
    rows = max(1, SLICE_ELEMENTS[logits.device.type] // max(1, logits.shape[1]))
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))


def _cross_entropy_fake(
    logits: Tensor, target: Tensor, reduction: str = "mean", ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    _check(logits, target, reduction)
    rows = logits.shape[:1]
    return contiguous_empty(logits, rows if reduction == "none" else ()), contiguous_empty(
        logits, rows, accumulate_dtype(logits.dtype)
    )


def _cross_entropy_kernel(
    logits: Tensor, target: Tensor, reduction: str = "mean", ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    _check(logits, target, reduction)
    lse = torch.empty(logits.shape[0], dtype=accumulate_dtype(logits.dtype), device=logits.device)
    for rows in _slices(logits):
        lse[rows] = logits[rows].to(lse.dtype).logsumexp(1)
    counted = target != ignore_index
    index = target.where(counted, 0).unsqueeze(1)
    picked = logits.gather(1, index).squeeze(1).to(lse.dtype)
    losses = (lse - picked).where(counted, 0.0)
    if reduction == "none":
        return losses.to(logits.dtype, copy=True), lse
    total = losses.sum()
    return (total / counted.sum() if reduction == "mean" else total).to(logits.dtype), lse


def _dgrad_fake(
    grad_loss: Tensor, logits: Tensor, target: Tensor, logsumexp: Tensor, reduction: str = "mean", ignore_index: int = -100
) -> Tensor:
    return contiguous_empty(logits, logits.shape)


def _dgrad_kernel(
    grad_loss: Tensor, logits: Tensor, target: Tensor, logsumexp: Tensor, reduction: str = "mean", ignore_index: int = -100
) -> Tensor:
    """(softmax(logits) - onehot(target)) * row_scale, with row_scale 0 where the target is ignored."""
    counted = target != ignore_index
    scale = grad_loss.to(logsumexp.dtype)
    scale = (scale / counted.sum() if reduction == "mean" else scale).expand(target.shape).where(counted, 0.0).unsqueeze(1)
    index = target.where(counted, 0).unsqueeze(1)
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    for rows in _slices(logits):
        part = grad[rows] if grad.dtype == logsumexp.dtype else torch.empty_like(grad[rows], dtype=logsumexp.dtype)
        torch.sub(logits[rows], logsumexp[rows].unsqueeze(1), out=part).exp_().mul_(scale[rows])
        part.scatter_add_(1, index[rows], -scale[rows])
        if part.dtype != grad.dtype:
            grad[rows] = part
    return grad


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, ctx.reduction, ctx.ignore_index = inputs
    lse = output[1]
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, lse)


def _backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return (None,) * 4
    logits, target, lse = ctx.saved_tensors
    return cross_entropy_dgrad(grad_loss, logits, target, lse, ctx.reduction, ctx.ignore_index), None, None, None


cross_entropy_dgrad = define(
    "cross_entropy_dgrad",
    '(Tensor grad_loss, Tensor logits, Tensor target, Tensor logsumexp, str reduction="mean", int ignore_index=-100) -> Tensor',
    _dgrad_fake,
    _dgrad_kernel,
)
"""Gradient of the logits, as they are shaped."""

cross_entropy = define(
    "cross_entropy",
    '(Tensor logits, Tensor target, str reduction="mean", int ignore_index=-100) -> (Tensor, Tensor)',
    _cross_entropy_fake,
    _cross_entropy_kernel,
    backward=_backward,
    setup_context=_setup_context,
)
"""(loss of logits' dtype: scalar, or (N,) for reduction "none"; logsumexp (N,) float32 or float64) of logits (N, C) and int64
target (N,). The mean is over targets other than ignore_index, nan if there are none, as torch's."""
