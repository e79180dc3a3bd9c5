"""Define piper::float8_scale and piper::float8_cast, which quantise a matrix in blocks that have one scale each.

piper::float8_past_scale stands for a scale of earlier steps, which is predicted and not executed.

Scales are float32, with the arithmetic of torchao 0.18 (float8/float8_utils.py): the largest number of the dtype over
the largest magnitude in float64, at least 1e-12, rounded to float32, and to a power of two below if asked for. Numbers
are multiplied in float32, and in float64 if they have it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piper_ops.float8.recipes import ALL, Float8
from piper_ops.ground.errors import UnsupportedVariant
from piper_ops.ground.library import FLOATS, contiguous_empty, define

LEAST = 1e-12
"""The least magnitude by which a scale is computed, so that no scale is infinite."""
SLICE = 2**24
"""The elements that a CUDA device converts at once, so that their float32 form needs little memory."""


def scale_shape(x: Tensor, rows: int, columns: int) -> tuple[int, int]:
    """Return the blocks of a matrix, as (down, across); raise UnsupportedVariant if blocks do not divide it."""
    for size, block, name in zip(x.shape, (rows, columns), ("rows", "columns"), strict=True):
        if block > 1 and size % block:
            raise UnsupportedVariant(
                f"float8: a matrix {tuple(x.shape)} does not divide into blocks of {block} {name}; use a number of "
                f"tokens and features that does, or the recipe 'rowwise'"
            )
    down, across = (
        1 if b == ALL else s // b for s, b in zip(x.shape, (rows, columns), strict=True)
    )
    return down, across


def _scale_fake(x: Tensor, rows: int, columns: int, dtype: torch.dtype, power: bool) -> Tensor:
    if x.dim() != 2 or x.dtype not in FLOATS:
        raise UnsupportedVariant(f"float8_scale: {x.dtype} of shape {tuple(x.shape)} is no matrix")
    return contiguous_empty(x, scale_shape(x, rows, columns), torch.float32)


def _scale_kernel(x: Tensor, rows: int, columns: int, dtype: torch.dtype, power: bool) -> Tensor:
    blocks = in_blocks(x, *scale_shape(x, rows, columns))
    # the largest magnitude; unlike amax(abs(x)) it needs no tensor of the size of x
    most = torch.linalg.vector_norm(blocks, torch.inf, (1, 3)).double()
    scale: Tensor = (torch.finfo(dtype).max / most.clamp(min=LEAST)).float()
    return scale.log2().floor().exp2() if power else scale


def _past_scale_fake(x: Tensor) -> Tensor:
    return contiguous_empty(x, (1, 1), torch.float32)


def _past_scale_kernel(x: Tensor) -> Tensor:
    raise UnsupportedVariant(Float8("delayed").cannot_run)


def in_blocks(x: Tensor, down: int, across: int) -> Tensor:
    """Return a view [down, rows, across, columns] of a matrix."""
    blocks: Tensor = x.unflatten(1, (across, -1)).unflatten(0, (down, -1))
    return blocks


def _cast_fake(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return contiguous_empty(x, x.shape, dtype)


def _cast_kernel(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return cast_in_slices(x, scale, dtype, SLICE if x.is_cuda else x.numel())


def cast_in_slices(x: Tensor, scale: Tensor, dtype: torch.dtype, most: int) -> Tensor:
    """Convert whole blocks of at most `most` elements at once, or one row of blocks."""
    shared = scale.shape[0] == 1  # then a slice may have any rows
    height = 1 if shared else x.shape[0] // scale.shape[0]
    step = height * max(1, most // max(1, height * x.shape[1]))
    if step >= x.shape[0]:
        return _converted(x, scale, dtype)
    result = contiguous_empty(x, x.shape, dtype)
    for k in range(0, x.shape[0], step):
        own = scale if shared else scale[k // height : (k + step) // height]
        result[k : k + step] = _converted(x[k : k + step], own, dtype)
    return result


def _converted(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    # a scale has float32, to which numbers of half precision are promoted
    wide = in_blocks(x, *scale.shape) * scale[:, None, :, None]
    return wide.clamp_(-most, most).to(dtype, memory_format=torch.contiguous_format).view(x.shape)


float8_scale = define(
    "float8_scale",
    "(Tensor x, int rows, int columns, ScalarType dtype, bool power) -> Tensor",
    _scale_fake,
    _scale_kernel,
    direct=True,
)
"""The scales [down, across] of the blocks of x [M, K], of `rows` x `columns` elements; 0 means all of them."""
float8_cast = define(
    "float8_cast",
    "(Tensor x, Tensor scale, ScalarType dtype) -> Tensor",
    _cast_fake,
    _cast_kernel,
    direct=True,
)
"""The numbers of x [M, K] times its scales, rounded to a float8 dtype; numbers beyond its range become its largest."""
float8_past_scale = define(
    "float8_past_scale", "(Tensor x) -> Tensor", _past_scale_fake, _past_scale_kernel
)
"""The scale [1, 1] that earlier steps left for all of x; it costs nothing, and cannot be executed."""
