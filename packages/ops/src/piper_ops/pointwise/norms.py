"""Define piper::layer_norm and piper::rms_norm, each with an op for the input gradient and one for the weight gradient.

layer_norm also has one op for both gradients. Statistics keep the leading dimensions of x with 1 for every normalised
one, in float32 (float64 for float64) on every device. wgrad never reads a weight: its dtype is handed in, so that a
weight gradient needs no gathered parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from piper_ops.ground.errors import UnsupportedVariant
from piper_ops.ground.library import FLOATS, HALF, accumulate_dtype, contiguous_empty, define

aten = torch.ops.aten
_native_layer_norm_backward = aten.native_layer_norm_backward.default


def _check(op: str, x: Tensor, shape: Sequence[int], *params: Tensor | None) -> None:
    if x.dtype not in FLOATS:
        raise UnsupportedVariant(
            f"{op}: dtype {x.dtype} is not one of {', '.join(map(str, FLOATS))}"
        )
    if not shape or tuple(x.shape[x.dim() - len(shape) :]) != tuple(shape):
        raise UnsupportedVariant(
            f"{op}: normalized_shape {tuple(shape)} is not the end of the input's shape {tuple(x.shape)}"
        )
    for param in params:
        if param is not None and (tuple(param.shape) != tuple(shape) or param.dtype != x.dtype):
            raise UnsupportedVariant(
                f"{op}: weight or bias {tuple(param.shape)} of {param.dtype} beside an input of {x.dtype} and "
                f"normalized_shape {tuple(shape)}; CUDA has no such kernel: give both one shape and dtype"
            )


def _stat(x: Tensor, shape: Sequence[int]) -> Tensor:
    lead = x.dim() - len(shape)
    return contiguous_empty(x, (*x.shape[:lead], *(1 for _ in shape)), accumulate_dtype(x.dtype))


def _dims(x: Tensor, shape: Sequence[int]) -> list[int]:
    return list(range(x.dim() - len(shape), x.dim()))


def _param_grads(
    x: Tensor, shape: Sequence[int], dtype: torch.dtype, mask: Sequence[bool]
) -> list[Tensor]:
    return [contiguous_empty(x, shape if wanted else (0,), dtype) for wanted in mask]


# --- layer_norm


def _layer_norm_fake(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _check("layer_norm", x, normalized_shape, weight, bias)
    return contiguous_empty(x, x.shape), _stat(x, normalized_shape), _stat(x, normalized_shape)


def _layer_norm_kernel(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    weight = _kernel_weight(x, normalized_shape, weight)
    if bias is not None and weight is not None:
        bias = bias.to(weight.dtype)
    return torch.native_layer_norm(x.contiguous(), normalized_shape, weight, bias, eps)


def _kernel_weight(x: Tensor, shape: Sequence[int], weight: Tensor | None) -> Tensor | None:
    """Return the weight as the kernel takes it.

    The CPU kernel keeps float32 statistics for a half-precision input only beside float32 weights; CUDA's always does.
    """
    if x.is_cuda or x.dtype not in HALF:
        return weight
    return x.new_ones(tuple(shape), dtype=torch.float32) if weight is None else weight.float()


def _dgrad_fake(grad_out: Tensor, x: Tensor, *_: object) -> Tensor:
    return contiguous_empty(x, x.shape)


def _layer_norm_dgrad_kernel(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
) -> Tensor:
    weight = _kernel_weight(x, normalized_shape, weight)
    grad_x: Tensor = _native_layer_norm_backward(
        grad_out.contiguous(),
        x.contiguous(),
        normalized_shape,
        mean,
        rstd,
        weight,
        None,
        [True, False, False],
    )[0]
    return grad_x


def _layer_norm_wgrad_fake(
    grad_out: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    dtype: torch.dtype,
    mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    grad_weight, grad_bias = _param_grads(x, shape, dtype, mask)
    return grad_weight, grad_bias


def _layer_norm_wgrad_kernel(
    grad_out: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    dtype: torch.dtype,
    mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    shape = list(shape)
    # aten allocates the gradients after the parameters and reads nothing else of them
    like = torch.empty(
        shape, dtype=x.dtype if x.is_cuda else accumulate_dtype(x.dtype), device=x.device
    )
    _, grad_weight, grad_bias = _native_layer_norm_backward(
        grad_out.contiguous(), x.contiguous(), shape, mean, rstd, like, like, [False, *mask]
    )
    absent = torch.empty(0, dtype=dtype, device=x.device)
    weight_wanted, bias_wanted = mask
    return grad_weight.to(dtype) if weight_wanted else absent, grad_bias.to(
        dtype
    ) if bias_wanted else absent.clone()


def _layer_norm_backward_fake(
    grad_out: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    grad_weight, grad_bias = _param_grads(x, shape, x.dtype, mask)
    return contiguous_empty(x, x.shape), grad_weight, grad_bias


def _layer_norm_backward_kernel(
    grad_out: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    weight = _kernel_weight(x, shape, weight)
    # as in wgrad: of the bias, no more is read than how its gradient is to be allocated
    like = (
        x.new_empty(shape, dtype=None if x.is_cuda else accumulate_dtype(x.dtype))
        if weight is None
        else weight
    )
    grad_x, grad_weight, grad_bias = _native_layer_norm_backward(
        grad_out.contiguous(), x.contiguous(), shape, mean, rstd, weight, like, [True, *mask]
    )
    wants_weight, wants_bias = mask
    grad_weight = grad_weight.to(x.dtype) if wants_weight else x.new_empty(0)
    return grad_x, grad_weight, grad_bias.to(x.dtype) if wants_bias else x.new_empty(0)


def _layer_norm_setup(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    x, ctx.shape, weight, _, _ = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, mean, rstd, weight)


def _layer_norm_backward(
    ctx: Any, grad_out: Tensor | None, *stats: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 5
    x, mean, rstd, weight = ctx.saved_tensors
    wants_x, _, *mask, _ = ctx.needs_input_grad
    grad_x = grad_weight = grad_bias = None
    if wants_x and any(mask):
        grad_x, grad_weight, grad_bias = layer_norm_backward(
            grad_out, x, ctx.shape, mean, rstd, weight, mask
        )
    elif wants_x:
        grad_x = layer_norm_dgrad(grad_out, x, ctx.shape, mean, rstd, weight)
    elif any(mask):
        grad_weight, grad_bias = layer_norm_wgrad(grad_out, x, ctx.shape, mean, rstd, x.dtype, mask)
    return grad_x, None, grad_weight if mask[0] else None, grad_bias if mask[1] else None, None


layer_norm_dgrad = define(
    "layer_norm_dgrad",
    "(Tensor grad_out, Tensor x, SymInt[] normalized_shape, Tensor mean, Tensor rstd, Tensor? weight) -> Tensor",
    _dgrad_fake,
    _layer_norm_dgrad_kernel,
    direct=True,
)
layer_norm_wgrad = define(
    "layer_norm_wgrad",
    "(Tensor grad_out, Tensor x, SymInt[] normalized_shape, Tensor mean, Tensor rstd, ScalarType dtype, bool[2] "
    "output_mask) -> (Tensor, Tensor)",
    _layer_norm_wgrad_fake,
    _layer_norm_wgrad_kernel,
    direct=True,
)
"""An op that returns (grad_weight, grad_bias) in `dtype`; one that output_mask leaves out has 0 elements."""
layer_norm_backward = define(
    "layer_norm_backward",
    "(Tensor grad_out, Tensor x, SymInt[] normalized_shape, Tensor mean, Tensor rstd, Tensor? weight, bool[2] "
    "output_mask) -> (Tensor, Tensor, Tensor)",
    _layer_norm_backward_fake,
    _layer_norm_backward_kernel,
    direct=True,
)
"""An op that returns (grad_x, grad_weight, grad_bias) in one pass over grad_out and x.

It costs hardly more than grad_x alone. A backward that is split into input and weight gradients computes it with the
former and hands on the gradients of the parameters, which are small.
"""
layer_norm = define(
    "layer_norm",
    "(Tensor x, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    _layer_norm_fake,
    _layer_norm_kernel,
    check=lambda x, shape, weight, bias, eps: _check("layer_norm", x, shape, weight, bias),
    direct=True,
    backward=_layer_norm_backward,
    setup_context=_layer_norm_setup,
)
"""An op that returns (out, mean, rstd) over the trailing normalized_shape of x; weight and bias have that shape."""
LAYER_NORMS = (layer_norm, layer_norm_dgrad, layer_norm_wgrad, layer_norm_backward)


# --- rms_norm


def _rms_norm_fake(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    _check("rms_norm", x, normalized_shape, weight)
    return contiguous_empty(x, x.shape), _stat(x, normalized_shape)


def _rms_norm_kernel(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    dtype = accumulate_dtype(x.dtype)
    # torch's default: the epsilon of the dtype of the arithmetic, not of the input
    eps = torch.finfo(dtype).eps if eps is None else eps
    if x.is_cuda:
        normalised, rstd = aten._fused_rms_norm(x, list(normalized_shape), weight, eps)
        return normalised, rstd
    wide = x.to(dtype)
    rstd = wide.square().mean(_dims(x, normalized_shape), keepdim=True).add_(eps).rsqrt_()
    wide = wide * rstd
    return (wide if weight is None else wide.mul_(weight)).to(x.dtype), rstd


def _rms_norm_dgrad_kernel(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
) -> Tensor:
    if x.is_cuda:
        grad_x: Tensor = aten._fused_rms_norm_backward(
            grad_out.contiguous(),
            x.contiguous(),
            list(normalized_shape),
            rstd,
            weight,
            [True, False],
        )[0]
        return grad_x
    grad, wide = grad_out.contiguous().to(rstd.dtype), x.contiguous().to(rstd.dtype)
    grad = grad * weight if weight is not None else grad.clone()
    # rstd (grad - x rstd mean(grad x rstd)), in few passes; rstd is not squared, which could leave the range of
    # float32.
    inner = (
        (grad * wide).mean(_dims(x, normalized_shape), keepdim=True).mul_(rstd).mul_(rstd).neg_()
    )
    return grad.addcmul_(wide, inner).mul_(rstd).to(x.dtype)


def _rms_norm_wgrad_fake(
    grad_out: Tensor, x: Tensor, normalized_shape: Sequence[int], rstd: Tensor, dtype: torch.dtype
) -> Tensor:
    return contiguous_empty(x, normalized_shape, dtype)


def _rms_norm_wgrad_kernel(
    grad_out: Tensor, x: Tensor, normalized_shape: Sequence[int], rstd: Tensor, dtype: torch.dtype
) -> Tensor:
    shape = list(normalized_shape)
    if x.is_cuda:
        like = torch.empty(shape, dtype=x.dtype, device=x.device)
        grads = aten._fused_rms_norm_backward(
            grad_out.contiguous(), x.contiguous(), shape, rstd, like, [False, True]
        )
        grad_weight: Tensor = grads[1]
        return grad_weight.to(dtype)
    product = (x.to(rstd.dtype) * rstd).mul_(grad_out)
    return product.reshape(-1, *shape).sum(0).to(dtype)


def _rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.shape, weight, _ = inputs
    rstd = output[1]
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, rstd, weight)


def _rms_norm_backward(
    ctx: Any, grad_out: Tensor | None, grad_rstd: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 4
    x, rstd, weight = ctx.saved_tensors
    wants_x, _, wants_weight, _ = ctx.needs_input_grad
    grad_x = rms_norm_dgrad(grad_out, x, ctx.shape, rstd, weight) if wants_x else None
    grad_weight = rms_norm_wgrad(grad_out, x, ctx.shape, rstd, x.dtype) if wants_weight else None
    return grad_x, None, grad_weight, None


rms_norm_dgrad = define(
    "rms_norm_dgrad",
    "(Tensor grad_out, Tensor x, SymInt[] normalized_shape, Tensor rstd, Tensor? weight) -> Tensor",
    _dgrad_fake,
    _rms_norm_dgrad_kernel,
    direct="unseen",
)
rms_norm_wgrad = define(
    "rms_norm_wgrad",
    "(Tensor grad_out, Tensor x, SymInt[] normalized_shape, Tensor rstd, ScalarType dtype) -> Tensor",
    _rms_norm_wgrad_fake,
    _rms_norm_wgrad_kernel,
    direct="unseen",
)
rms_norm = define(
    "rms_norm",
    "(Tensor x, SymInt[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)",
    _rms_norm_fake,
    _rms_norm_kernel,
    check=lambda x, shape, weight, eps: _check("rms_norm", x, shape, weight),
    direct="unseen",
    backward=_rms_norm_backward,
    setup_context=_rms_norm_setup,
)
"""An op that returns (out, rstd) over the trailing normalized_shape of x; the weight has that shape and x's dtype.

eps None is torch's default.
"""
