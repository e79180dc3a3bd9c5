"""Sort choices, and sum the rows of tokens, on a CPU in a kernel each.

A sum over a token's choices is an embedding bag of torch: rows are picked by their numbers, scaled and added without a
copy of them in between. That takes a fourth of the time that a product per choice takes. numpy sorts numbers of 16 bits
by their digits, torch any numbers by comparing them.

The same choices are sorted by several ops behind each other. The last order is kept as long as nobody asks for another
one and the choices live, in as few bits as it needs.

The functions allocate on meta tensors as on a CPU, so that their memory can be counted.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_sum_bags = torch.ops.aten._embedding_bag_forward_only.default
_dot_bags = torch.ops.aten._embedding_bag_per_sample_weights_backward.default
SUMMED = (torch.float32, torch.float64)
"""The dtypes whose bags are summed in themselves."""


class _Last:
    """Hold the order of the choices that were sorted last."""

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._version = 0
        self._order: npt.NDArray[Any] | None = None

    def get(self, chosen: Tensor) -> npt.NDArray[Any] | None:
        """Return the order of choices, if these are the last ones and were not written since."""
        known = self._of is not None and self._of() is chosen and self._version == _version(chosen)
        return self._order if known else None

    def put(self, chosen: Tensor, order: npt.NDArray[Any]) -> None:
        if (version := _version(chosen)) is not None:
            self._of, self._version, self._order = weakref.ref(chosen, self._forget), version, order

    def _forget(self, gone: object) -> None:
        if self._of is gone:
            self._of = self._order = None


def _version(chosen: Tensor) -> int | None:
    """Return how often choices were written; None in torch.inference_mode, since torch does not count there."""
    return None if chosen.is_inference() else chosen._version


_last = _Last()


def takes(*tensors: Tensor) -> bool:
    """Return whether the kernels take tensors of floating-point numbers: of one dtype, dense, and some."""
    dtype = tensors[0].dtype
    return dtype in SUMMED and all(
        t.dtype == dtype and t.is_contiguous() and t.numel() for t in tensors
    )


def order(chosen: Tensor, experts: int = 0) -> Tensor:
    """Return the numbers of all choices, sorted by expert, and in their own order for equal experts.

    Raises IndexError for an expert that does not exist, if the number of `experts` is given.
    """
    result = torch.empty(chosen.numel(), dtype=torch.int64, device=chosen.device)
    if chosen.is_meta or not chosen.numel():
        return result
    if not experts and (known := _last.get(chosen)) is not None:
        result.numpy()[:] = known
        return result
    numbers = chosen.numpy().reshape(-1)
    largest = int(numbers.max())
    if experts and (largest >= experts or int(numbers.min()) < 0):
        raise IndexError(f"route: a chosen expert is out of range: there are {experts}, from 0 on")
    positions = np.argsort(
        numbers.astype(np.uint16) if largest < 1 << 16 else numbers, kind="stable"
    )
    result.numpy()[:] = positions
    _last.put(chosen, positions.astype(np.uint16) if positions.size <= 1 << 16 else positions)
    return result


def counts(chosen: Tensor, experts: int) -> Tensor:
    """Return how many choices each expert has."""
    return (
        chosen.new_empty(experts)
        if chosen.is_meta
        else torch.bincount(chosen.reshape(-1), minlength=experts)
    )


def places(chosen: Tensor) -> Tensor:
    """Return the row of each choice."""
    choice = order(chosen)
    return torch.empty_like(choice).scatter_(0, choice, _numbers(choice))


def _numbers(like: Tensor, step: int = 1) -> Tensor:
    return torch.arange(0, like.shape[0], step, device=like.device)


def _summed(rows: Tensor, picked: Tensor, first: Tensor, share: Tensor | None) -> Tensor:
    """Return for each bag the sum of its picked rows times their shares; `first` has the beginnings of the bags."""
    if not rows.is_meta:
        sums: Tensor = _sum_bags(rows, picked, first, False, 0, False, share)[0]
        return sums
    sizes = (
        0 if rows.dtype == torch.float32 else picked.shape[0] + 1,
        first.shape[0],
        first.shape[0],
    )
    result = rows.new_empty((first.shape[0], rows.shape[1]))
    beside = [picked.new_empty(size) for size in sizes]  # further results of torch's kernel
    del beside
    return result


def route(x: Tensor, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Compute piper::route."""
    token = order(chosen, experts).floor_divide_(chosen.shape[1])
    return x.index_select(0, token), counts(chosen, experts)


def route_dgrad(grad: Tensor, chosen: Tensor) -> Tensor:
    """Compute piper::route_dgrad."""
    place = places(chosen)
    return _summed(grad, place, _numbers(place, chosen.shape[1]), None)


def unroute(rows: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
    """Compute piper::unroute."""
    place = places(chosen)
    return _summed(rows, place, _numbers(place, chosen.shape[1]), share.view(-1))


def unroute_dgrad(grad: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
    """Compute piper::unroute_dgrad."""
    choice = order(chosen)
    share = share.view(-1).index_select(0, choice)
    return _summed(grad, choice.floor_divide_(chosen.shape[1]), _numbers(choice), share)


def unroute_wgrad(grad: Tensor, chosen: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute piper::unroute_wgrad."""
    place = places(chosen)
    bag = _numbers(place).floor_divide_(chosen.shape[1])
    first = _numbers(place, chosen.shape[1])
    dots: Tensor = (
        grad.new_empty(place.shape) if grad.is_meta else _dot_bags(grad, rows, place, first, bag, 0)
    )
    return dots.view(chosen.shape)
