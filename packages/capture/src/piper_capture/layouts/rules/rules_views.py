"""Say how ops loop that show the elements of a tensor in another shape or order, or some of them."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch

from piper_capture.layouts.loops import (
    DimOf,
    Inner,
    Localize,
    Loops,
    Nest,
    OpCall,
    Shape,
    unchanged,
)
from piper_capture.layouts.rules.letters import (
    OUT,
    all_whole,
    lettered,
    numbered,
    place,
    rank,
)
from piper_capture.layouts.rules.rules_elementwise import broadcast
from piper_capture.torch_api._torch import OpOverload

aten = torch.ops.aten
ALL = (frozenset({0}),)
"""The op is linear in its one tensor."""


def takes_shape(name: str) -> Localize:
    """Return a function that gives the shape of the first result's part as an argument."""

    def localize(call: OpCall, results: Sequence[Shape]) -> Mapping[str, Any]:
        return {name: list(results[0])}

    return localize


def _view(name: str, call: OpCall) -> Loops:
    if 0 in call.shape(0):
        return all_whole(call)
    return Loops(tuple(_alike(call)), linear=ALL, localize=takes_shape(name))


def _alike(call: OpCall) -> Iterator[tuple[Nest, Nest]]:
    """Yield the shortest runs of dimensions of a view and of its argument that have the same elements.

    Of [2, 3, 8] and [6, 2, 4] the runs are [2, 3] and [6], and [8] and [2, 4]. A run that does not fit into cuts
    elsewhere leaves the others alone.
    """
    ends = [list(accumulate(call.shape(t), operator.mul)) for t in (0, OUT)]
    common = sorted({*ends[0]}.intersection(ends[1]) - {prod(call.shape(0))})
    bounds = [[0, *(bisect_right(end, size) for size in common), len(end)] for end in ends]
    for (a, b), (c, d) in zip(*map(pairwise, bounds), strict=True):
        yield call.dims(0)[a:b], call.dims(OUT)[c:d]


def _permuted(call: OpCall, order: Sequence[int]) -> Loops:
    return lettered({0: numbered(len(order)), OUT: [str(d) for d in order]}, linear=ALL)


def _permute(call: OpCall) -> Loops:
    return _permuted(call, [int(d) % rank(call, 0) for d in call.get("dims")])


def _transpose(call: OpCall) -> Loops:
    order = list(range(rank(call, 0)))
    a, b = place(call, 0, "dim0"), place(call, 0, "dim1")
    if order:
        order[a], order[b] = order[b], order[a]
    return _permuted(call, order)


def _t(call: OpCall) -> Loops:
    return _permuted(call, list(range(rank(call, 0)))[::-1])


def _unsqueeze(call: OpCall) -> Loops:
    dim = int(call.get("dim")) % rank(call, OUT)
    names = numbered(rank(call, 0))
    return lettered({0: names, OUT: [*names[:dim], None, *names[dim:]]}, linear=ALL)


def _squeeze(call: OpCall) -> Loops:
    """Return the loops of an op that drops dimensions of size 1.

    It leaves a named dimension of another size as it is, but would drop a part of size 1 of it.
    """
    count, argument = rank(call, 0), call.get("dim") if "dim" in call.args else range(rank(call, 0))
    dims = {int(d) % max(1, count) for d in ([argument] if isinstance(argument, int) else argument)}
    names = numbered(count, without=[d for d in dims if d < count])
    left = [n for d, n in enumerate(names) if d not in dims or call.shape(0)[d] != 1]
    return lettered({0: names, OUT: left}, linear=ALL)


def _expand(call: OpCall) -> Loops:
    return Loops(tuple(broadcast(call, 0, OUT)), linear=ALL, localize=takes_shape("size"))


def _select(call: OpCall) -> Loops:
    dim = place(call, 0, "dim")
    names = numbered(rank(call, 0), without=[dim])
    return lettered({0: names, OUT: names[:dim] + names[dim + 1 :]}, linear=ALL)


def _select_backward(call: OpCall) -> Loops:
    dim = int(call.get("dim")) % rank(call, OUT)
    names = numbered(rank(call, OUT), without=[dim])
    loops = {0: names[:dim] + names[dim + 1 :], OUT: names}
    return lettered(loops, linear=ALL, localize=takes_shape("input_sizes"))


def _unbind(call: OpCall) -> Loops:
    dim = place(call, 0, "dim")
    names = numbered(rank(call, 0), without=[dim])
    return lettered(
        {0: names, **{-1 - k: names[:dim] + names[dim + 1 :] for k in range(len(call.results))}},
        linear=ALL,
    )


def span(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Return the first element and the one behind the last of a slice of a dimension, as torch reads them."""
    first, last = (0 if start is None else int(start)), (size if end is None else int(end))
    first, last = (x + size if x < 0 else x for x in (first, last))
    first = min(max(first, 0), size)
    return first, min(max(last, first), size)


def sliced(call: OpCall, whole: int, part: int) -> tuple[Loops, int, int]:
    """Return how a tensor and a slice of it loop, the number of the slice among equal ones, and its dimension.

    The slice is a block of [blocks, steps]. If its size or start is no multiple of that, it cannot be sharded.
    """
    dim = place(call, whole, "dim")
    size, taken = call.shape(whole)[dim], call.shape(part)[dim]
    first, _ = span(size, call.get("start"), call.get("end"))
    names = numbered(rank(call, whole), without=[dim])
    loops = lettered({whole: names, part: names})
    if int(call.get("step", 1)) != 1 or not taken or size % taken or first % taken:
        return loops, 0, dim
    which = Inner(size // taken)
    same = (*loops.same, ((DimOf(whole, dim),), (which, DimOf(part, dim))))
    return Loops(same, whole=frozenset({which})), first // taken, dim


def _slice(call: OpCall) -> Loops:
    loops, number, dim = sliced(call, 0, OUT)

    def localize(call: OpCall, results: Sequence[Shape]) -> Mapping[str, Any]:
        part = results[0][dim]
        return {"start": number * part, "end": (number + 1) * part}

    blocks = any(isinstance(loop, Inner) for loop in loops.whole)
    return Loops(
        loops.same, whole=loops.whole, linear=ALL, localize=localize if blocks else unchanged
    )


def _diagonal(whole: int, part: int, name: str, call: OpCall) -> Loops:
    """Return the loops of a tensor, two of whose dimensions are one, the last, in its diagonal."""
    count = rank(call, whole)
    gone = {int(call.get(d)) % count for d in ("dim1", "dim2")}
    names = numbered(count, without=gone)
    left = [n for d, n in enumerate(names) if d not in gone]
    return lettered(
        {whole: names, part: [*left, None]},
        linear=ALL,
        localize=takes_shape(name) if name else unchanged,
    )


def _triangle(call: OpCall) -> Loops:
    count = rank(call, 0)
    names = numbered(count, without=(count - 2, count - 1))
    return lettered({0: names, OUT: names}, linear=ALL)


def _unfold(call: OpCall) -> Loops:
    names = numbered(rank(call, 0), without=[place(call, 0, "dimension")])
    return lettered({0: names, OUT: [*names, None]}, linear=ALL)


def _unfold_backward(call: OpCall) -> Loops:
    names = numbered(rank(call, OUT), without=[int(call.get("dim")) % rank(call, OUT)])
    return lettered(
        {0: [*names, None], OUT: names}, linear=ALL, localize=takes_shape("input_sizes")
    )


RULES: dict[OpOverload, Callable[[OpCall], Loops]] = {
    aten.view.default: partial(_view, "size"),
    aten._unsafe_view.default: partial(_view, "size"),
    aten.reshape.default: partial(_view, "shape"),
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.expand.default: _expand,
    aten.select.int: _select,
    aten.select_backward.default: _select_backward,
    aten.unbind.int: _unbind,
    aten.slice.Tensor: _slice,
    aten.diagonal.default: partial(_diagonal, 0, OUT, ""),
    aten.diagonal_backward.default: partial(_diagonal, OUT, 0, "input_sizes"),
    aten.diag_embed.default: partial(_diagonal, OUT, 0, ""),
    aten.tril.default: _triangle,
    aten.triu.default: _triangle,
    aten.unfold.default: _unfold,
    aten.unfold_backward.default: _unfold_backward,
}
