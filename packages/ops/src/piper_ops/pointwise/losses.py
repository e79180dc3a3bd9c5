"""Define piper::cross_entropy and piper::cross_entropy_dgrad, which save logits and one logsumexp per row.

No log-softmax is saved. The kernels work through the rows in slices, so that little is alive beside the logits and
their gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piper_ops.ground.errors import UnsupportedVariant
from piper_ops.ground.library import FLOATS, HALF, accumulate_dtype, contiguous_empty, define

SLICE_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
"""The number of logits per slice.

On a CPU they are 1 MiB of float32, which stays in a core's cache (a third of the time of 16 MiB, measured). On a GPU
they are 64 MiB, which fills it (not yet measured); `piper_ops.costing.workspace` counts on this number.
"""

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
"""The accepted reductions, with aten's number for each."""
_nll_loss = torch.ops.aten.nll_loss_forward.default
_softmax = torch.ops.aten._softmax.out


def _check(logits: Tensor, target: Tensor, reduction: str = "mean", *_: object) -> None:
    if logits.dim() != 2 or tuple(target.shape) != tuple(logits.shape[:1]):
        raise UnsupportedVariant(
            f"cross_entropy: logits {tuple(logits.shape)} and target {tuple(target.shape)} are not (N, C) and (N,)"
        )
    if logits.dtype not in FLOATS or target.dtype != torch.int64:
        raise UnsupportedVariant(
            f"cross_entropy: logits of {logits.dtype} and target of {target.dtype} are not floating-point and int64"
        )
    if reduction not in REDUCTIONS:
        raise UnsupportedVariant(
            f"cross_entropy: reduction {reduction!r}; accepted are {', '.join(REDUCTIONS)}"
        )


def rows_per_slice(device: str, classes: int) -> int:
    """Return how many rows of logits a kernel works on at once on this type of device: at least one."""
    return max(1, SLICE_ELEMENTS[device] // max(1, classes))


def slices_of(logits: Tensor) -> list[slice]:
    """Return the slices of rows that a kernel works through: at least one, so that no rows give torch's result."""
    rows = rows_per_slice(logits.device.type, logits.shape[1])
    return [slice(start, start + rows) for start in range(0, max(1, logits.shape[0]), rows)]


def _cross_entropy_fake(
    logits: Tensor, target: Tensor, reduction: str = "mean", *_: object
) -> tuple[Tensor, Tensor]:
    _check(logits, target, reduction)
    rows, dtype = logits.shape[:1], accumulate_dtype(logits.dtype)
    return contiguous_empty(logits, rows if reduction == "none" else (), dtype), contiguous_empty(
        logits, rows, dtype
    )


def _cross_entropy_kernel(
    logits: Tensor, target: Tensor, reduction: str = "mean", ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    slices = slices_of(logits)
    if len(slices) == 1:
        return _slice_loss(logits, target, reduction, ignore_index)
    parts = [_slice_loss(logits[rows], target[rows], "none", ignore_index) for rows in slices]
    losses, lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    if reduction == "none":
        return losses, lse
    total = losses.sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total, lse


def _slice_loss(
    logits: Tensor, target: Tensor, reduction: str, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return the loss and the logsumexp of a slice of rows.

    A row's logsumexp is its logit at the target (at any class for an ignored row) less its log-softmax there.
    """
    log_probabilities = torch.log_softmax(logits, 1, accumulate_dtype(logits.dtype))
    loss, _ = _nll_loss(log_probabilities, target, None, REDUCTIONS[reduction], ignore_index)
    index = target.clamp(0, logits.shape[1] - 1).unsqueeze(1)
    return loss, (logits.gather(1, index) - log_probabilities.gather(1, index)).squeeze(1)


def _dgrad_fake(grad_loss: Tensor, logits: Tensor, *_: object) -> Tensor:
    return contiguous_empty(logits, logits.shape)


def _dgrad_kernel(
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    logsumexp: Tensor,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """Return (softmax(logits) - onehot(target)) * row_scale, with row_scale 0 if the target is ignored.

    The softmax is computed anew: torch's kernel for it is faster than exp(logits - logsumexp) op by op.
    """
    dtype = logsumexp.dtype
    counted = target != ignore_index
    scale = grad_loss.to(dtype)
    scale = torch.where(
        counted, scale / counted.sum() if reduction == "mean" else scale, 0.0
    ).unsqueeze(1)
    index = target.clamp(0, logits.shape[1] - 1).unsqueeze(1)
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    write = _write_half_dgrad if logits.dtype in HALF else _write_dgrad
    for rows in slices_of(logits):
        write(grad[rows], logits[rows], logsumexp[rows], scale[rows], index[rows])
    return grad


def _write_dgrad(
    grad: Tensor, logits: Tensor, logsumexp: Tensor, scale: Tensor, index: Tensor
) -> None:
    """Write the gradient of a slice, with the softmax in place so that no second copy of the slice is alive."""
    _softmax(logits, 1, False, out=grad)
    grad.mul_(scale).scatter_add_(1, index, -scale)


def _write_half_dgrad(
    grad: Tensor, logits: Tensor, logsumexp: Tensor, scale: Tensor, index: Tensor
) -> None:
    """Write the gradient of a slice in half precision, with one float32 copy of the slice alive, from the logsumexp.

    torch's softmax converts bfloat16 before it begins, which makes another copy (CUDA, torch 2.11: "conversion is
    supported for Half type only").
    """
    probabilities = torch.sub(logits, logsumexp.unsqueeze(1)).exp_()
    probabilities.scatter_add_(1, index, probabilities.new_full((), -1.0).expand_as(index))
    torch.mul(probabilities, scale, out=grad)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, ctx.reduction, ctx.ignore_index = inputs
    lse = output[1]
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, lse)


def _backward(
    ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return (None,) * 4
    logits, target, lse = ctx.saved_tensors
    return (
        cross_entropy_dgrad(grad_loss, logits, target, lse, ctx.reduction, ctx.ignore_index),
        None,
        None,
        None,
    )


cross_entropy_dgrad = define(
    "cross_entropy_dgrad",
    '(Tensor grad_loss, Tensor logits, Tensor target, Tensor logsumexp, str reduction="mean", int '
    "ignore_index=-100) -> Tensor",
    _dgrad_fake,
    _dgrad_kernel,
    direct="unseen",
)
"""An op that returns the gradient of the logits, in their shape."""

cross_entropy = define(
    "cross_entropy",
    '(Tensor logits, Tensor target, str reduction="mean", int ignore_index=-100) -> (Tensor, '
    "Tensor)",
    _cross_entropy_fake,
    _cross_entropy_kernel,
    check=_check,
    direct="unseen",
    backward=_backward,
    setup_context=_setup_context,
)
"""An op that takes logits (N, C) and an int64 target (N,), and returns (loss, logsumexp).

The loss is a scalar, or (N,) for reduction "none"; the logsumexp is (N,). Both are in float64 for logits of float64,
else in float32: torch rounds the loss of bfloat16 logits to bfloat16, which has three digits. The mean is over targets
other than ignore_index, and nan if there are none, as torch's.
"""
