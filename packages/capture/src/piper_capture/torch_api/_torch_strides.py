"""Give fake results the strides that torch's kernels give, where torch's own traces have others.

A trace computes some operators by a decomposition, whose result may lie in memory in another order than the kernel's.
Then a later copy is one that the trace has and the run has not, or the other way round. The operators were found by
running torch's samples of all operators forward and backward, on transposed tensors, beside their fake versions
(torch 2.13); max_unpool2d, replication_pad2d, channel_shuffle and batch norms of three dimensions were left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_aten = torch.ops.aten
ELEMENT_WISE = frozenset({
    _aten.copysign.Tensor, _aten.div.Tensor_mode, _aten.floor_divide.default, _aten.hardswish_backward.default,
    _aten.hardtanh_backward.default, _aten.logit_backward.default, _aten.native_dropout_backward.default,
    _aten.special_xlog1py.default, _aten.xlogy.Tensor,
})  # fmt: skip
"""The operators whose results lie in memory as the sum of their operands does."""
CONTIGUOUS = frozenset({
    _aten._log_softmax_backward_data.default, _aten.huber_loss_backward.default, _aten.log_sigmoid_forward.default,
    _aten.mse_loss_backward.default, _aten.native_layer_norm_backward.default, _aten.smooth_l1_loss_backward.default,
})  # fmt: skip
"""The operators whose results are contiguous."""


def as_kernels_lay_out(op: OpOverload, args: Sequence[Any], result: Any) -> Any:
    """Return the fake result of an operator, with the strides of its kernel's."""
    if op in ELEMENT_WISE:
        like = reduce(torch.add, [a.detach() for a in args if isinstance(a, Tensor)])
        return _in_order(result, like)
    if op in CONTIGUOUS:
        return tuple(map(_in_rows, result)) if isinstance(result, tuple) else _in_rows(result)
    return result


def _in_order(result: Tensor, like: Tensor) -> Tensor:
    if result.stride() == like.stride() or result.shape != like.shape:
        return result
    return result.new_empty_strided(tuple(result.shape), like.stride())


def _in_rows(result: Any) -> Any:
    if not isinstance(result, Tensor) or result.is_contiguous():
        return result
    return result.new_empty(tuple(result.shape))
