"""Faults in attention whose tokens devices share: those that such code has had elsewhere. Each gives wrong numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch import Tensor, fx

from piper_capture.layouts import conversions
from piper_capture.layouts.context import _Steps
from piper_ops import shift
from piper_ops.attention import context as kernels

Coordinate = conversions.Coordinate


def zigzag_as_blocks() -> AbstractContextManager[Any]:
    """Of the second half of the sequence each device takes the block at its place from the front, not from behind."""
    return patch.object(conversions, "Coordinate", lambda axis, mirrored=False: Coordinate(axis))


def places_swapped() -> AbstractContextManager[Any]:
    """Each device takes the blocks of the one that has the same place from behind."""
    right = conversions._selected

    def swapped(emit: Any, split: fx.Node, dim: int, axis: str) -> fx.Node:
        with patch.object(
            conversions, "Coordinate", lambda axis, mirrored=False: Coordinate(axis, not mirrored)
        ):
            return right(emit, split, dim, axis)

    return patch.object(conversions, "_selected", swapped)


def logsumexp_of_one_block() -> AbstractContextManager[Any]:
    """The logsumexp is that of the own keys, whatever is merged."""
    right = kernels._merge_into

    def merged(out: Tensor, logsumexp: Tensor, more: Tensor, more_logsumexp: Tensor) -> None:
        right(out, logsumexp.clone(), more, more_logsumexp)

    return patch.object(kernels, "_merge_into", merged)


def gradients_of_keys_not_returned() -> AbstractContextManager[Any]:
    """The last message, which brings the gradients of keys and values home, is not sent."""
    right = _Steps.moved

    def moved(steps: Any, x: fx.Node) -> fx.Node:
        made = right(steps, x)
        sent = [
            n
            for n in made.graph.nodes
            if n.target is shift and n.meta["partitioner_tag"] == "is_backward"
        ]
        return x if len(sent) == 2 * steps.place.degree - 1 else made

    return patch.object(_Steps, "moved", moved)


def block_skipped() -> AbstractContextManager[Any]:
    """What the keys of the device before give is not merged."""
    right = _Steps.merged

    def merged(steps: Any, before: Any, more: Any, step: int) -> Any:
        return before if step == 1 else right(steps, before, more, step)

    return patch.object(_Steps, "merged", merged)


def gradient_of_block_skipped() -> AbstractContextManager[Any]:
    """What the queries of one step give to the gradients of keys is left out."""
    right = _Steps.added

    def added(steps: Any, total: fx.Node, more: fx.Node, step: int, *, keys: bool) -> fx.Node:
        return total if keys and step == 1 else right(steps, total, more, step, keys=keys)

    return patch.object(_Steps, "added", added)


def causal_where_full() -> AbstractContextManager[Any]:
    """Also in pairs of blocks that are met whole, queries see the keys up to their own place."""
    right = _Steps.attention
    return patch.object(_Steps, "attention", lambda steps, q, k, v, step: right(steps, q, k, v, 0))


def keys_always_from_before() -> AbstractContextManager[Any]:
    """Both blocks of queries meet the first block of keys in every step."""
    return patch.object(kernels, "chosen", lambda place, step, keys: (0, 0) if keys else (0, 1))


FAULTS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    made.__name__: made
    for made in (
        zigzag_as_blocks, places_swapped, logsumexp_of_one_block, gradients_of_keys_not_returned,
        block_skipped, gradient_of_block_skipped, causal_where_full, keys_always_from_before,
    )
}  # fmt: skip
"""The faults by name."""
