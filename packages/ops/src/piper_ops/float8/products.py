"""Define piper::float8_mm, the product of two quantised matrices, and float8_linear, a layer that multiplies so.

On a CUDA device of capability 8.9 or more a product with scales by tensor or by row is torch._scaled_mm. Everywhere
else it is emulated: the numbers are divided by their scales and multiplied in float32 (float64 for a result in it), as
torchao does with `emulate=True`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from piper_ops.float8.quantise import (
    float8_cast,
    float8_past_scale,
    float8_scale,
    in_blocks,
)
from piper_ops.float8.recipes import RECIPES, Float8Recipe, QuantisedOperand
from piper_ops.ground.library import LIBRARY, accumulate_dtype, contiguous_empty, define

CAPABILITY = (8, 9)
"""The least compute capability with products in float8 (torch's at::cuda::blas::scaled_gemm)."""
DIVISOR = 16
"""The number that must divide the sizes of operands on a device (torch._scaled_mm)."""


def _mm_fake(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    return contiguous_empty(a, (a.shape[0], b.shape[1]), dtype)


def _mm_kernel(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    first, second = Quantised(a, scale_a), Quantised(b, scale_b)
    if a.is_cuda and _on_tensor_cores(first, second):
        return _scaled_mm(first, second, dtype, fast)
    wide = accumulate_dtype(dtype)
    return torch.mm(first.dequantised(wide), second.dequantised(wide)).to(dtype)


class Quantised(NamedTuple):
    """Hold a matrix in float8, and the scales of its blocks."""

    matrix: Tensor
    scale: Tensor

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix in a wider dtype, divided by its scales."""
        wide = self.matrix.to(dtype)
        in_blocks(wide, *self.scale.shape).div_(self.scale[:, None, :, None])
        return wide

    def transposed(self) -> Quantised:
        return Quantised(self.matrix.t(), self.scale.t())


def _on_tensor_cores(a: Quantised, b: Quantised) -> bool:
    rows, summed = a.matrix.shape
    columns = b.matrix.shape[1]
    scaled = {tuple(a.scale.shape), tuple(reversed(b.scale.shape))}
    return (
        torch.cuda.get_device_capability(a.matrix.device) >= CAPABILITY
        and not summed % DIVISOR
        and not columns % DIVISOR
        and scaled <= {(1, 1), (rows, 1), (columns, 1)}
    )


def _scaled_mm(a: Quantised, b: Quantised, dtype: torch.dtype, fast: bool) -> Tensor:
    """Multiply on tensor cores, as torchao 0.18 does (float8/float8_ops.py: addmm_float8_unwrapped).

    Scales by row without fast accumulation are applied to the result, since the kernel that takes them is slow so.
    """
    left, right = a.scale.reciprocal(), b.scale.reciprocal()
    rows, columns = a.matrix.shape[0], b.matrix.shape[1]
    after = None
    if max(left.numel(), right.numel()) > 1:
        if fast:
            left, right = (
                left.expand(rows, 1).contiguous(),
                right.expand(1, columns).contiguous(),
            )
        else:
            after, left, right = left * right, left.new_ones(()), left.new_ones(())
    else:
        left, right = left.view(()), right.view(())
    # by row the kernel gives bfloat16 alone
    kept = torch.bfloat16 if left.dim() else dtype
    first = a.matrix if a.matrix.stride(1) == 1 else a.matrix.contiguous()
    second = b.matrix if b.matrix.stride(0) == 1 else b.matrix.t().contiguous().t()
    result = torch._scaled_mm(first, second, left, right, out_dtype=kept, use_fast_accum=fast)
    return (result if after is None else result.mul_(after)).to(dtype)


float8_mm = define(
    "float8_mm",
    "(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, ScalarType dtype, bool fast) -> Tensor",
    _mm_fake,
    _mm_kernel,
    direct=True,
)
"""The product of a [M, K] and b [K, N], each divided by the scales of its blocks, in a dtype.

`fast` lets tensor cores add up in less than float32.
"""


def _quantised(x: Tensor, operand: QuantisedOperand, kept: int, recipe: Float8Recipe) -> Quantised:
    """Return a matrix in float8; `kept` is the dimension that the result of the product has, too."""
    blocks = (operand.kept, operand.summed)[:: -1 if kept else 1]
    if recipe.delayed:
        scale = float8_past_scale(x)
    else:
        scale = float8_scale(x, *blocks, operand.dtype, recipe.power)
    return Quantised(float8_cast(x, scale, operand.dtype), scale)


class _Linear(torch.autograd.Function):
    """Compute x w^T with quantised operands, and its two gradients.

    Each gradient quantises its operands anew from tensors in the dtype of the layer, as torchao's
    matmul_with_hp_or_float8_args does; operands whose blocks are alike both ways are quantised once for both.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: str, saved: str) -> Tensor:
        made = RECIPES[recipe]
        of_input, of_weight = made.forward
        rows = x.reshape(-1, x.shape[-1])
        a = _quantised(rows, of_input, 0, made)
        b = _quantised(weight, of_weight, 0, made)
        result = float8_mm(*a, *b.transposed(), x.dtype, True)
        ctx.recipe, ctx.shape = made, x.shape
        if saved == "input" or made.wgrad is None:
            ctx.save_for_backward(weight, rows)
        elif of_input.alike:
            ctx.save_for_backward(weight, *a)
        else:
            ctx.save_for_backward(weight, *_quantised(rows, made.wgrad[1], 1, made))
        return torch.Tensor.view(result, *x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        weight, *saved = ctx.saved_tensors
        made: Float8Recipe = ctx.recipe
        wants_input, wants_weight, *_ = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        of_grad, of_weight = made.dgrad
        shared = made.wgrad is not None and of_grad.alike and made.wgrad[0] == of_grad
        grad_input = grad_weight = known = None
        if wants_input or shared:
            known = _quantised(rows, of_grad, 0, made)
        if wants_input and known is not None:
            b = _quantised(weight, of_weight, 1, made)
            grad_input = float8_mm(*known, *b, grad.dtype, False).view(ctx.shape)
        if wants_weight:
            known = known if shared else None
            grad_weight = _weight_gradient(made, rows, known, saved)
        return grad_input, grad_weight, None, None


def _weight_gradient(
    recipe: Float8Recipe,
    grad: Tensor,
    quantised: Quantised | None,
    saved: list[Tensor],
) -> Tensor:
    """Return dy^T x; `saved` is x, or x in float8 with its scales."""
    if recipe.wgrad is None:
        return torch.mm(grad.t(), saved[0])
    of_grad, of_input = recipe.wgrad
    a = quantised or _quantised(grad, of_grad, 1, recipe)
    b = saved if len(saved) == 2 else _quantised(saved[0], of_input, 1, recipe)
    product: Tensor = float8_mm(*a.transposed(), *b, grad.dtype, False)
    return product


def _linear(x: Tensor, weight: Tensor, recipe: str, saved: str) -> Tensor:
    result: Tensor = _Linear.apply(x, weight, recipe, saved)  # type: ignore[no-untyped-call]  # torch's is untyped
    return result


LIBRARY.define("float8_linear(Tensor x, Tensor weight, str recipe, str saved) -> Tensor")
LIBRARY.impl("float8_linear", _linear, "CompositeImplicitAutograd")
float8_linear: torch._ops.OpOverload = torch.ops.piper.float8_linear.default
"""The product of x [..., K] and w [N, K]^T; its operands, and the ones of its gradients, are quantised by a recipe.

It is no node of the graph of a chunk, which has the ops above in its place.
"""
