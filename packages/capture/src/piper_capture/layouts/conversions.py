"""Redistribute a tensor from one placement to another, by a collective or by taking the device's own shard.

Placement a dimension that is [outer, degree, rest] over all devices, device k of `degree` holds [outer, k, rest].
Collectives stack along a leading dimension, so the permutation that brings `degree` there and back is a node of the
graph.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx

from piper_capture.layouts.decide import PARTIAL, Placement, SharedAxis
from piper_capture.layouts.emit import Emitter
from piper_capture.layouts.indexes import LoopIndex
from piper_capture.values import aliasing
from piper_capture.values.coordinate import Coordinate
from piper_ir.ground.mesh import whole_axis
from piper_ops import all_gather, all_reduce, all_to_all, reduce_scatter

aten = torch.ops.aten
TensorDims = Sequence[tuple[LoopIndex, ...]]
WHOLE = "whole_tensor"
"""The key of the meta of a gather or reduce-scatter for the tensor's place, and the node of the whole tensor."""


@dataclass(frozen=True, slots=True)
class Redistribution:
    """Describe how a tensor is redistributed.

    Attributes:
        dims: the tensor's dimensions, each with its indexes.
        axes: the axes along which devices share it.
        before: its placement along each axis.
        want: its placement along each axis afterwards.
    """

    dims: TensorDims
    axes: Sequence[SharedAxis]
    before: Sequence[Placement]
    want: Sequence[Placement]

    def joined_until(self, first: int) -> int:
        """Return the end of the axes from `first` on that are parts of one and convert in the same way."""
        last, axes = first + 1, self.axes
        while (
            last < len(axes)
            and whole_axis(axes[last].name) == whole_axis(axes[first].name) != axes[first].name
        ):
            same = all(
                _follows(self.dims, placement[last - 1], placement[last])
                for placement in (self.before, self.want)
            )
            if not same or self.before[last] == self.want[last]:
                break
            last += 1
        return last


def convert(emit: Emitter, source: fx.Node, move: Redistribution) -> fx.Node:
    """Return `source` redistributed along all axes.

    Neighbouring axes into which one is split take one message where it can do the same for them all.
    """
    number = 0
    while number < len(move.axes):
        last = move.joined_until(number)
        if move.before[number] != move.want[number]:
            source = _converted(emit, source, move, number, last)
        move = replace(move, before=(*move.want[:last], *move.before[last:]))
        number = last
    return source


def joined_axis(axes: Sequence[SharedAxis], first: int, last: int) -> SharedAxis:
    """Return neighbouring axes into which one is split as one axis."""
    family = [a for a in axes if whole_axis(a.name) == whole_axis(axes[first].name)]
    name = (
        whole_axis(axes[first].name)
        if last - first == len(family)
        else "+".join(a.name for a in axes[first:last])
    )
    return replace(axes[first], name=name, degree=prod(a.degree for a in axes[first:last]))


def _follows(dims: TensorDims, outer: Placement, inner: Placement) -> bool:
    """Return whether two axes shard a tensor along neighbouring indexes, or have one unsharded placement."""
    if isinstance(outer, LoopIndex) and isinstance(inner, LoopIndex):
        return any(pair == (outer, inner) for dim in dims for pair in pairwise(dim))
    return outer == inner


def _converted(
    emit: Emitter, source: fx.Node, move: Redistribution, first: int, last: int
) -> fx.Node:
    before, want = move.before, move.want
    now, then = before[first], want[first]
    others: set[Placement] = {
        placement
        for k, placement in enumerate(before)
        if not first <= k < last and isinstance(placement, LoopIndex)
    }
    axis = joined_axis(move.axes, first, last)

    def at(index: LoopIndex, others: Set[Placement] = others) -> DimPlace:
        return DimPlace(*place_in(move.dims, index, others), index in axis.halves)

    match now, then:
        case LoopIndex(), None:
            return _gather(emit, source, at(now), axis)
        case None, LoopIndex():
            return _own(emit, source, at(then), axis)
        case _, None if now is PARTIAL:
            return emit.call(all_reduce, source, axis.name, axis.degree)
        case _, LoopIndex() if now is PARTIAL:
            return _scatter(emit, source, at(then), axis)
        case LoopIndex(), LoopIndex():
            # both may be in one dimension: the source is sharded along `now` and has all of `then`, the result the
            # reverse
            split_at = at(then, others.union(before[first:last]))
            gather_at = at(now, others.union(want[first:last]))
            return _exchange(emit, source, gather_at, split_at, axis)
        case LoopIndex(), _:
            return _spread(emit, source, at(now), axis)
        case None, _ if then is PARTIAL:
            return _first(emit, source, axis)
    raise AssertionError(f"from {now} to {then}")


class DimPlace(NamedTuple):
    """Say where an index is, on one device of the other axes.

    Attributes:
        dim: the dimension.
        outer: the steps of the factors outside of the index there.
        mirrored: whether devices are counted from behind in every second of these steps.
    """

    dim: int
    outer: int
    mirrored: bool = False


def place_in(dims: TensorDims, index: LoopIndex, others: Set[Placement]) -> tuple[int, int]:
    """Return where an index is, on a device that has its part along `others` already."""
    dim, inside = next((d, inside) for d, inside in enumerate(dims) if index in inside)
    return dim, prod(i.size for i in inside[: inside.index(index)] if i not in others)


def _gather(emit: Emitter, source: fx.Node, place: DimPlace, axis: SharedAxis) -> fx.Node:
    stacked = emit.call(all_gather, _dense(emit, source), axis.name, axis.degree)
    whole = _merged(emit, stacked, place)
    stacked.meta[WHOLE] = place, whole
    return whole


def _scatter(emit: Emitter, source: fx.Node, place: DimPlace, axis: SharedAxis) -> fx.Node:
    mine = emit.call(
        reduce_scatter, _stacked(emit, source, place, axis.degree), axis.name, axis.degree
    )
    mine.meta[WHOLE] = place, source
    return mine


def _exchange(
    emit: Emitter, source: fx.Node, now: DimPlace, then: DimPlace, axis: SharedAxis
) -> fx.Node:
    stacked = _stacked(emit, source, then, axis.degree)
    return _merged(emit, emit.call(all_to_all, stacked, axis.name, axis.degree), now)


def _own(emit: Emitter, source: fx.Node, place: DimPlace, axis: SharedAxis) -> fx.Node:
    """Take the device's shard of a replicated tensor."""
    dim, outer, mirrored = place
    shape = list(aliasing.tensor(source).shape)
    split = _viewed(
        emit,
        source,
        [*shape[:dim], outer, axis.degree, shape[dim] // outer // axis.degree, *shape[dim + 1 :]],
    )
    own = (
        _selected(emit, split, dim, axis.name)
        if mirrored
        else emit.call(aten.select.int, split, dim + 1, Coordinate(axis.name))
    )
    return _viewed(
        emit, _dense(emit, own), [*shape[:dim], shape[dim] // axis.degree, *shape[dim + 1 :]]
    )


def _selected(emit: Emitter, split: fx.Node, dim: int, axis: str) -> fx.Node:
    """Return the device's place of [outer, degree], counted from behind in every second of the outer steps."""
    halves = _halved(emit, split, dim)
    own = [
        emit.call(
            aten.select.int,
            emit.call(aten.select.int, halves, dim + 1, k),
            dim + 1,
            Coordinate(axis, mirrored=k == 1),
        )
        for k in range(2)
    ]
    return emit.call(aten.stack.default, own, dim + 1)


def _halved(emit: Emitter, split: fx.Node, dim: int) -> fx.Node:
    """Return a tensor whose dimension is [outer, ...] with that as [outer / 2, 2, ...]."""
    shape = list(aliasing.tensor(split).shape)
    return _viewed(emit, split, [*shape[:dim], shape[dim] // 2, 2, *shape[dim + 1 :]])


def _turned(emit: Emitter, split: fx.Node, dim: int) -> fx.Node:
    """Return a tensor of dimensions [outer, degree] from `dim` on, with every second step of the outer turned around.

    Doing it twice changes nothing.
    """
    shape = list(aliasing.tensor(split).shape)
    halves = _halved(emit, _dense(emit, split), dim)
    first, second = (emit.call(aten.select.int, halves, dim + 1, k) for k in range(2))
    both = emit.call(
        aten.stack.default, [first, emit.call(aten.flip.default, second, [dim + 1])], dim + 1
    )
    return _viewed(emit, both, shape)


def _spread(emit: Emitter, source: fx.Node, place: DimPlace, axis: SharedAxis) -> fx.Node:
    """Put the device's shard into a tensor of zeros at its place, which makes it a partial sum."""
    dim, outer, mirrored = place
    value = aliasing.tensor(source)
    shape = list(value.shape)
    rest = shape[dim] // outer
    wide = [*shape[:dim], outer, axis.degree, rest, *shape[dim + 1 :]]
    zeros = emit.call(aten.zeros.default, wide, dtype=value.dtype, device=value.device)
    part = _viewed(emit, source, [*shape[:dim], outer, rest, *shape[dim + 1 :]])
    placed = emit.call(aten.select_scatter.default, zeros, part, dim + 1, Coordinate(axis.name))
    placed = _turned(emit, placed, dim) if mirrored else placed
    return _viewed(emit, placed, [*shape[:dim], shape[dim] * axis.degree, *shape[dim + 1 :]])


def _first(emit: Emitter, source: fx.Node, axis: SharedAxis) -> fx.Node:
    """Make a replicated tensor a partial sum: the first device keeps it, the others have zeros."""
    place = emit.call(
        aten.full.default,
        [],
        Coordinate(axis.name),
        dtype=torch.int64,
        device=aliasing.tensor(source).device,
    )
    return emit.call(aten.where.ScalarOther, emit.call(aten.eq.Scalar, place, 0), source, 0)


def _stacked(emit: Emitter, source: fx.Node, place: DimPlace, degree: int) -> fx.Node:
    """Return a tensor with the blocks along a dimension stacked along a new leading one."""
    dim, outer, mirrored = place
    shape = list(aliasing.tensor(source).shape)
    rest = shape[dim] // outer // degree
    split = _viewed(
        emit, _dense(emit, source), [*shape[:dim], outer, degree, rest, *shape[dim + 1 :]]
    )
    split = _turned(emit, split, dim) if mirrored else split
    rank = len(shape) + 2
    order = [dim + 1, *(d for d in range(rank) if d != dim + 1)]
    first = (
        split
        if order == sorted(order)
        else _dense(emit, emit.call(aten.permute.default, split, order))
    )
    return _viewed(emit, first, [degree, *shape[:dim], outer * rest, *shape[dim + 1 :]])


def _merged(emit: Emitter, stacked: fx.Node, place: DimPlace) -> fx.Node:
    """Return stacked blocks as one dimension: the inverse of `_stacked`."""
    dim, outer, mirrored = place
    degree, *shape = aliasing.tensor(stacked).shape
    split = _viewed(
        emit, stacked, [degree, *shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :]]
    )
    rank = len(shape) + 2
    order = [*range(1, dim + 2), 0, *range(dim + 2, rank)]
    back = (
        split
        if order == sorted(order)
        else _dense(emit, emit.call(aten.permute.default, split, order))
    )
    back = _turned(emit, back, dim) if mirrored else back
    return _viewed(emit, back, [*shape[:dim], shape[dim] * degree, *shape[dim + 1 :]])


def _viewed(emit: Emitter, source: fx.Node, shape: list[int]) -> fx.Node:
    shape = [int(s) for s in shape]
    return (
        source
        if list(aliasing.tensor(source).shape) == shape
        else emit.call(aten.view.default, source, shape)
    )


def _dense(emit: Emitter, source: fx.Node) -> fx.Node:
    if aliasing.tensor(source).is_contiguous():
        return source
    return emit.call(aten.clone.default, source, memory_format=torch.contiguous_format)


def own_what_is_spoiled(emit: Emitter) -> None:
    """Copy the input of a reduce-scatter if another op reads it too, since the collective overwrites it."""
    for node in list(emit.graph.nodes):
        if node.target is reduce_scatter and _has_other_users(node.args[0]):
            with (
                emit.graph.inserting_before(node),
                emit.like(node, "backward" in str(node.meta["partitioner_tag"])),
            ):
                copy = emit.call(
                    aten.clone.default, node.args[0], memory_format=torch.contiguous_format
                )
            node.args = (copy, *node.args[1:])


def _has_other_users(node: Any) -> bool:
    """Return whether a tensor, or the base of a view, has more than one user or is a graph input."""
    while aliasing.is_view(node):
        if len(node.users) > 1:
            return True
        node = aliasing.source(node)
    return len(node.users) > 1 or node.op != "call_function"
