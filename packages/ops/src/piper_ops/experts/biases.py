"""Define piper::grouped_add: experts whose products have biases (GPT-OSS).

    out = grouped_add(grouped_mm(rows, counts, weight), counts, bias)     # each expert's rows plus its bias

Rows behind the last expert's are zero in the result, as in `grouped_mm`, and give nothing to the gradient of a bias.
That gradient is summed in float32 for half precision. The host waits for the counts where `grouped_mm` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piper_ops.experts.experts import ALIGNED, has_kernel, sizes_of, wgrad_kernel
from piper_ops.ground.errors import UnsupportedVariant
from piper_ops.ground.library import FLOATS, contiguous_empty, define


def _check(rows: Tensor, counts: Tensor, bias: Tensor) -> None:
    fits = rows.dim() == 2 and bias.dim() == 2 and rows.shape[1] == bias.shape[1]
    if not fits or rows.dtype not in FLOATS or rows.dtype != bias.dtype:
        raise UnsupportedVariant(
            f"grouped_add: rows {tuple(rows.shape)} of {rows.dtype} and bias {tuple(bias.shape)} of {bias.dtype} "
            f"are not (M, N) and (E, N) of one floating-point dtype"
        )
    if counts.shape != bias.shape[:1] or counts.dtype != torch.int64:
        raise UnsupportedVariant(
            f"grouped_add: counts {tuple(counts.shape)} of {counts.dtype} are not int64, one for each of the "
            f"{bias.shape[0]} experts"
        )


def _fake(rows: Tensor, counts: Tensor, bias: Tensor) -> Tensor:
    _check(rows, counts, bias)
    return contiguous_empty(rows, rows.shape)


def _kernel(rows: Tensor, counts: Tensor, bias: Tensor) -> Tensor:
    if has_kernel(rows):
        ends = torch.cat((counts, rows.shape[0] - counts.sum(0, keepdim=True)))
        expert = torch.repeat_interleave(ends, output_size=rows.shape[0])
        total = bias.index_select(0, expert.clamp(max=bias.shape[0] - 1)).add_(rows)
        return total.masked_fill_((expert == bias.shape[0]).unsqueeze(1), 0)
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    sizes = sizes_of(counts, rows.shape[0])
    *results, behind = output.split_with_sizes(sizes)
    for x, own, result in zip(rows.split_with_sizes(sizes), bias.unbind(), results, strict=False):
        torch.add(x, own, out=result)
    behind.zero_()
    return output


def _wgrad_fake(grad: Tensor, counts: Tensor) -> Tensor:
    return contiguous_empty(grad, (counts.shape[0], grad.shape[1]))


def _wgrad_kernel(grad: Tensor, counts: Tensor) -> Tensor:
    if has_kernel(grad):
        ones = grad.new_ones((grad.shape[0], ALIGNED))
        return wgrad_kernel(ones, counts, grad)[:, 0].contiguous()
    total = grad.new_empty((counts.shape[0], grad.shape[1]))
    groups = grad.split_with_sizes(sizes_of(counts, grad.shape[0]))
    for above, result in zip(groups, total.unbind(), strict=False):
        torch.sum(above, 0, out=result)
    return total


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    wants_bias = ctx.needs_input_grad[2]
    return grad, None, grouped_add_wgrad(grad, ctx.saved_tensors[0]) if wants_bias else None


grouped_add_wgrad = define(
    "grouped_add_wgrad", "(Tensor grad, Tensor counts) -> Tensor", _wgrad_fake, _wgrad_kernel,
    direct=True,
)  # fmt: skip
"""An op that returns the gradient (E, N) of the biases: zeros for an expert without rows."""
grouped_add = define(
    "grouped_add", "(Tensor rows, Tensor counts, Tensor bias) -> Tensor", _fake, _kernel,
    check=_check, direct=True, backward=_backward, setup_context=_setup,
)  # fmt: skip
"""An op that takes rows (M, N), the counts (E,) of each expert and its bias (E, N), and returns (M, N).

The first bias is added to the first counts[0] rows, and so on. Rows behind them all are zero.
"""
