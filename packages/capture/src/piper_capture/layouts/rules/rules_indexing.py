"""Say how ops loop that look elements up by their numbers, or put elements where numbers say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from piper_capture.layouts.loops import Loops, OpCall
from piper_capture.layouts.rules.letters import (
    OUT,
    Names,
    all_whole,
    each,
    lettered,
    numbered,
    place,
    rank,
)
from piper_capture.torch_api._torch import OpOverload

aten = torch.ops.aten


def _embedding(call: OpCall) -> Loops:
    weight, indices = call.number("weight"), call.number("indices")
    places = numbered(rank(call, indices))
    return lettered(
        {weight: [None, "width"], indices: places, OUT: [*places, "width"]}, linear=each(weight)
    )


def _embedding_gradient(call: OpCall) -> Loops:
    """Return the loops of a table's gradient, a sum over all places of a number; their count is no such sum."""
    grad, indices = call.number("grad_output"), call.number("indices")
    places = numbered(rank(call, indices))
    chosen = [name for name in places if name is not None]
    counted = bool(call.get("scale_grad_by_freq"))
    return lettered(
        {indices: places, grad: [*places, "width"], OUT: [None, "width"]},
        summed=() if counted else chosen,
        whole=chosen if counted else (),
        linear=each(grad),
    )


def _gather(call: OpCall) -> Loops:
    """Return the loops of a choice along one dimension: each number looks into all of it.

    Another dimension cannot be sharded if the index tensor has fewer elements there.
    """
    dim = place(call, 0, "dim")
    index = call.number("index")
    names, short = _beside(call, 0, index, dim)
    looked = ["chosen" if d == dim else name for d, name in enumerate(short)]
    return lettered({0: names, index: looked, OUT: looked}, linear=each(0))


def _scatter(call: OpCall) -> Loops:
    """Return the loops of an op that writes along one dimension; others of equal size can be sharded."""
    dim = place(call, 0, "dim")
    index = call.number("index")
    names, short = _beside(call, 0, index, dim)
    loops: dict[int, Names] = {0: names, OUT: names, index: short}
    for k in call.numbers("src"):
        size, whole = call.shape(index), call.shape(k)
        loops[k] = (
            [n if size[d] == whole[d] else None for d, n in enumerate(short)]
            if len(whole) == len(size)
            else []
        )
    return lettered(loops, linear=_terms(call, ("src",), by_value="value"))


def _beside(call: OpCall, whole: int, part: int, dim: int) -> tuple[Names, Names]:
    """Return names for two tensors of one rank, equal in the dimensions other than `dim` in which their sizes are."""
    sizes, others = call.shape(whole), call.shape(part)
    apart = [d for d in range(len(sizes)) if d == dim or sizes[d] != others[d]]
    names = numbered(len(sizes), without=apart)
    return names, names


def _terms(call: OpCall, written: Sequence[str], by_value: str = "") -> tuple[frozenset[int], ...]:
    """Return that the first tensor and the source are partial sums together; a scalar other than 0 is none."""
    if call.args.get("reduce") is not None or (call.args.get(by_value, 0) != 0):
        return ()
    return (frozenset({0, *(k for name in written for k in call.numbers(name))}),)


def _index_select(call: OpCall) -> Loops:
    dim, index = place(call, 0, "dim"), call.number("index")
    names = numbered(rank(call, 0), without=[dim])
    chosen = ["chosen" if d == dim else name for d, name in enumerate(names)]
    return lettered({0: names, index: ["chosen"][: rank(call, index)], OUT: chosen}, linear=each(0))


def _index_add(call: OpCall) -> Loops:
    """Return the loops of an op that adds rows, or copies them, to where the numbers say."""
    dim, index, source = place(call, 0, "dim"), call.number("index"), call.number("source")
    names = numbered(rank(call, 0), without=[dim])
    return lettered(
        {0: names, OUT: names, source: names, index: [None] * rank(call, index)},
        linear=_terms(call, ("source",)),
    )


def _index(call: OpCall) -> Loops:
    indexing = _indexed(call)
    if indexing is None:
        return all_whole(call)
    names, numbers, result = indexing
    return lettered({0: names, **numbers, OUT: result}, linear=each(0))


def _index_put(call: OpCall) -> Loops:
    indexing = _indexed(call)
    if indexing is None:
        return all_whole(call)
    names, numbers, result = indexing
    (values,) = call.numbers("values")
    looked = {name for dim_names in numbers.values() for name in dim_names if name is not None}
    aligned = list(result)[len(result) - rank(call, values) :]
    kept = [n if size != 1 else None for n, size in zip(aligned, call.shape(values), strict=True)]
    return lettered(
        {0: names, OUT: names, **numbers, values: kept},
        whole=looked,
        linear=_terms(call, ("values",)),
    )


def _indexed(call: OpCall) -> tuple[Names, dict[int, Names], Names] | None:
    """Return names for a tensor, the tensors of indices into it, and the result.

    The dimensions of the numbers, broadcast against each other, stand where the first number is, or first of all where
    other dimensions lie between numbers. None for masks of booleans.
    """
    indices = list(call.get("indices")) + [None] * (rank(call, 0) - len(call.get("indices")))
    tensors = iter(call.numbers("indices"))
    numbers = [None if g is None else next(tensors) for g in indices]
    present = [k for k in numbers if k is not None]
    if any(call.tensors[k].dtype in (torch.bool, torch.uint8) for k in present):
        return None
    wide = max((rank(call, k) for k in present), default=0)
    sizes = torch.broadcast_shapes(*(call.shape(k) for k in present))
    looked = {k: _aligned(call.shape(k), sizes) for k in present}
    dims = [d for d, k in enumerate(numbers) if k is not None]
    names = numbered(len(numbers), without=dims)
    adjacent = dims == list(range(dims[0], dims[0] + len(dims))) if dims else True
    first = dims[0] if dims and adjacent else 0
    rest = [(d, n) for d, n in enumerate(names) if d not in dims]
    before, behind = [n for d, n in rest if d < first], [n for d, n in rest if d >= first]
    return names, looked, [*before, *(f"number{d}" for d in range(wide)), *behind]


def _aligned(shape: Sequence[int], wide: Sequence[int]) -> Names:
    offset = len(wide) - len(shape)
    return [
        f"number{offset + d}" if size == wide[offset + d] else None for d, size in enumerate(shape)
    ]


def _bucketize(call: OpCall) -> Loops:
    places = numbered(rank(call, 0))
    return lettered({0: places, OUT: places, call.number("boundaries"): [None]})


RULES: dict[OpOverload, Callable[[OpCall], Loops]] = {
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_gradient,
    aten.gather.default: _gather,
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
    aten.scatter_add.default: _scatter,
    aten.scatter_reduce.two: _scatter,
    aten.index_select.default: _index_select,
    aten.index_add.default: _index_add,
    aten.index_copy.default: _index_add,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten.bucketize.Tensor: _bucketize,
}
