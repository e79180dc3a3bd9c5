"""Say how ops loop that take tensors apart, put them together, or write one into another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from piper_capture.layouts.rules.letters import OUT, lettered, numbered, place, rank
from piper_capture.layouts.rules.rules_views import ALL, sliced
from piper_capture.torch_api._torch import OpOverload

aten = torch.ops.aten


def _split(name: str, call: OpCall) -> Loops:
    """Return the loops of a split. Equal parts are blocks of [parts, steps], and the steps can be sharded."""
    dim = place(call, 0, "dim")
    parts = [-1 - k for k in range(len(call.results))]

    def localize(call: OpCall, results: Sequence[Shape]) -> Mapping[str, Any]:
        return {
            name: results[0][dim] if name == "split_size" else [shape[dim] for shape in results]
        }

    return _blocks(call, 0, parts, dim, ALL, localize)


def _cat(call: OpCall) -> Loops:
    parts = [
        k for k in call.numbers("tensors") if rank(call, k) == rank(call, OUT)
    ]  # not torch's empty vectors
    linear = (frozenset(range(len(call.tensors))),)
    return _blocks(call, OUT, parts, place(call, OUT, "dim"), linear, unchanged)


def _blocks(
    call: OpCall,
    whole: int,
    parts: Sequence[int],
    dim: int,
    linear: tuple[frozenset[int], ...],
    localize: Localize,
) -> Loops:
    names = numbered(rank(call, whole), without=[dim])
    loops = lettered({k: names for k in (whole, *parts)}, linear=linear)
    sizes = [call.shape(k)[dim] for k in parts]
    if len(set(sizes)) > 1 or not sizes or sum(sizes) != call.shape(whole)[dim] or not sizes[0]:
        return loops
    which = Inner(len(parts))
    same: tuple[tuple[Nest, Nest], ...] = tuple(
        ((DimOf(whole, dim),), (which, DimOf(k, dim))) for k in parts
    )
    return replace(loops, same=(*loops.same, *same), whole=frozenset({which}), localize=localize)


def _stack(call: OpCall) -> Loops:
    dim = int(call.get("dim")) % rank(call, OUT)
    names = numbered(rank(call, OUT), without=[dim])
    parts = range(len(call.tensors))
    return lettered(
        {OUT: names, **dict.fromkeys(parts, names[:dim] + names[dim + 1 :])},
        linear=(frozenset(parts),),
    )


def _slice_backward(call: OpCall) -> Loops:
    loops, number, dim = sliced(call, OUT, 0)
    return replace(loops, linear=ALL, localize=_moved(loops, number, dim, ("input_sizes",)))


def _slice_scatter(call: OpCall) -> Loops:
    loops, number, dim = sliced(call, OUT, 1)
    names = numbered(rank(call, OUT), without=[] if _in_blocks(loops) else [dim])
    same = (*loops.same, *lettered({OUT: names, 0: names}).same)
    whole = loops.whole | ({DimOf(0, dim)} if not _in_blocks(loops) else set())
    return Loops(
        same, whole=whole, linear=(frozenset({0, 1}),), localize=_moved(loops, number, dim, ())
    )


def _in_blocks(loops: Loops) -> bool:
    return any(isinstance(loop, Inner) for loop in loops.whole)


def _moved(loops: Loops, number: int, dim: int, shapes: tuple[str, ...]) -> Localize:
    """Return how the place of a slice in the first result changes: to the same one of as many blocks."""
    blocks = next((loop.size for loop in loops.whole if isinstance(loop, Inner)), 0)

    def localize(call: OpCall, results: Sequence[Shape]) -> Mapping[str, Any]:
        part = results[0][dim] // blocks if blocks else 0
        place = {"start": number * part, "end": (number + 1) * part} if blocks else {}
        return {**{name: list(results[0]) for name in shapes}, **place}

    return localize


def _select_scatter(call: OpCall) -> Loops:
    dim = place(call, 0, "dim")
    names = numbered(rank(call, 0), without=[dim])
    return lettered(
        {0: names, 1: names[:dim] + names[dim + 1 :], OUT: names}, linear=(frozenset({0, 1}),)
    )


def _pad(call: OpCall) -> Loops:
    """Return the loops of a padding: dimensions without padding can be sharded."""
    count, pad = rank(call, 0), call.get("pad")
    padded = {count - 1 - k // 2 for k, width in enumerate(pad) if width}
    names = numbered(count, without=padded)
    return lettered({0: names, OUT: names}, linear=ALL if call.get("value") == 0 else ())


def _repeat(call: OpCall) -> Loops:
    """Return the loops of a tensor that is repeated.

    A dimension of size 1 becomes one of copies, which can be sharded.
    """
    added = rank(call, OUT) - rank(call, 0)
    same: list[tuple[Nest, Nest]] = []
    whole: set[DimOf | Inner] = set()
    for d, size in enumerate(call.shape(0)):
        copies = Inner(int(call.get("repeats")[added + d]), d)
        if size != 1:
            same.append(((DimOf(OUT, added + d),), (copies, DimOf(0, d))))
            whole.add(copies)

    def localize(call: OpCall, results: Sequence[Shape]) -> Mapping[str, Any]:
        free = [k < added or call.shape(0)[k - added] == 1 for k in range(len(results[0]))]
        return {
            "repeats": [
                size if f else n
                for size, f, n in zip(results[0], free, call.get("repeats"), strict=True)
            ]
        }

    return Loops(tuple(same), whole=frozenset(whole), linear=ALL, localize=localize)


def _moves_along(name: str, call: OpCall) -> Loops:
    """Return the loops of an op that reverses or rotates some dimensions; without any, it takes the tensor as one."""
    count = rank(call, 0)
    argument = call.get(name)
    dims = {
        int(d) % max(1, count) for d in ([argument] if isinstance(argument, int) else argument)
    } or set(range(count))
    names = numbered(count, without=dims)
    return lettered({0: names, OUT: names}, linear=ALL)


RULES: dict[OpOverload, Callable[[OpCall], Loops]] = {
    aten.split.Tensor: lambda call: _split("split_size", call),
    aten.split_with_sizes.default: lambda call: _split("split_sizes", call),
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.slice_backward.default: _slice_backward,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.constant_pad_nd.default: _pad,
    aten.repeat.default: _repeat,
    aten.flip.default: lambda call: _moves_along("dims", call),
    aten.roll.default: lambda call: _moves_along("dims", call),
}
