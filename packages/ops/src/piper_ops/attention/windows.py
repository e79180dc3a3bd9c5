"""Attend in a window: a query attends to its own key and the `window` - 1 keys before it (arXiv 2004.05150, section 3).

Queries are computed in blocks that meet only the keys in their windows, so that memory and work grow with the tokens
and not with their square. FlashAttention on CUDA devices skips the other keys itself. Other kernels get a mask, which
is the same for all blocks: the queries of a block see a diagonal band of its keys.

Devices that share tokens have queries of their own and all keys. They have one block of the sequence each, or two in
the order "zigzag" (`piper_ops.attention.context`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from piper_ops.attention.context import ZIGZAG
from piper_ops.attention.lowering import LoweringName
from piper_ops.attention.sdpa_kernels import (
    AttentionInputs,
    BackwardKernel,
    ForwardKernel,
    Pair,
    Triple,
)
from piper_ops.ground.library import accumulate_dtype

LEAST_BLOCK = 128
"""The least number of queries in a block; of large windows it is a quarter of the window's keys."""


class WindowBlock(NamedTuple):
    """Say which queries meet which keys.

    Attributes:
        queries: their places in the tensor of queries.
        keys: the places of the keys in their windows, and perhaps of some beside these.
        ahead: how many of these keys stand before the first query's own.
    """

    queries: slice
    keys: slice
    ahead: int

    def of(self, given: AttentionInputs, band: Tensor | None) -> AttentionInputs:
        """Return the inputs of a kernel that computes the block: with a part of the band, or with the window."""
        q, k, v = given.q[:, :, self.queries], given.k[:, :, self.keys], given.v[:, :, self.keys]
        if band is None:
            return AttentionInputs(q, k, v, None, True, given.scale, given.window)
        first = given.window - 1 - self.ahead
        mask = band[: q.shape[2], first : first + k.shape[2]]
        return AttentionInputs(q, k, v, mask, False, given.scale)


def in_window(
    name: LoweringName, forward: ForwardKernel, backward: BackwardKernel
) -> tuple[ForwardKernel, BackwardKernel]:
    """Return kernels that attend in the window of their inputs, made of the kernels of a lowering."""
    skips = name == "cuda_flash"
    return partial(_forward, forward, skips), partial(_backward, backward, skips)


def _forward(kernel: ForwardKernel, skips: bool, given: AttentionInputs) -> Pair:
    if skips and given.degree == 1:
        return kernel(given)
    q, given = given.q, _bounded(given)
    out = _heads_first(q, given.v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=accumulate_dtype(q.dtype))
    band = None if skips else _band(given)
    for block in _blocks(given, skips):
        at = block.queries
        out[:, :, at], lse[:, :, at] = kernel(block.of(given, band))
    return out, lse


def _backward(
    kernel: BackwardKernel,
    skips: bool,
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    given: AttentionInputs,
) -> Triple:
    """Sum the gradients of keys and values over blocks, in float32 or wider."""
    if skips and given.degree == 1:
        return kernel(grad, out, lse, given)
    given, wide = _bounded(given), accumulate_dtype(given.q.dtype)
    gq, gk, gv = (_heads_first(t, t.shape[3]) for t in (given.q, given.k, given.v))
    sums = [t.zero_() if t.dtype == wide else torch.zeros_like(t, dtype=wide) for t in (gk, gv)]
    band = None if skips else _band(given)
    for block in _blocks(given, skips):
        at = block.queries
        of_block = grad[:, :, at], out[:, :, at], lse[:, :, at].contiguous()
        gq[:, :, at], *parts = kernel(*of_block, block.of(given, band))
        for total, part in zip(sums, parts, strict=True):
            total[:, :, block.keys].add_(part)
        del parts
    for grads, total in zip((gk, gv), sums, strict=True):
        if total is not grads:
            grads.copy_(total)
    return gq, gk, gv


def _bounded(given: AttentionInputs) -> AttentionInputs:
    return given._replace(window=min(given.window, given.k.shape[2]))


def _heads_first(like: Tensor, dim: int) -> Tensor:
    """Return a new tensor [batch, heads, T, dim] with the strides of the op's result."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty((batch, tokens, heads, dim)).transpose(1, 2)


def _begins(given: AttentionInputs) -> tuple[int, ...]:
    """Return the places in the sequence at which the device's blocks of tokens begin."""
    tokens, place, degree = given.q.shape[2], given.place, given.degree
    if given.order == ZIGZAG and degree > 1:
        return place * tokens // 2, (2 * degree - 1 - place) * tokens // 2
    return (place * tokens,)


def _most_queries(given: AttentionInputs) -> int:
    return min(max(LEAST_BLOCK, given.window // 4), given.q.shape[2] // len(_begins(given)))


def _blocks(given: AttentionInputs, skips: bool) -> Iterator[WindowBlock]:
    """Yield the blocks of queries; for a kernel that skips keys itself they are as large as they can be.

    With shared tokens, masked blocks of the first device have as many keys as the other devices have, whose memory is
    planned alike.
    """
    begins = _begins(given)
    length = given.q.shape[2] // len(begins)
    most = length if skips else _most_queries(given)
    for number, begin in enumerate(begins):
        for at in range(0, length, most):
            first, end = begin + at, begin + min(at + most, length)
            low = max(0, first - given.window + 1)
            alike = 0 if skips or given.degree == 1 else end - first + given.window - 1
            high = min(max(end, low + alike), given.k.shape[2])
            here = number * length - begin
            yield WindowBlock(slice(here + first, here + end), slice(low, high), first - low)


def _band(given: AttentionInputs) -> Tensor:
    """Return the mask that all blocks take a part of: row i has zeros from column i on, as many as the window has keys.

    The zeros are written through a view in which the band's rows stand below each other, without another tensor.
    """
    rows, window = _most_queries(given), given.window
    columns = rows + (window - 1) * (1 if given.degree == 1 else 2)
    band = given.q.new_full((rows, columns), float("-inf"))
    band.as_strided((rows, window), (columns + 1, 1)).zero_()
    return band
