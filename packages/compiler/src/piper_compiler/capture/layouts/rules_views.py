"""Say how ops loop that only move elements: views, copies of parts, and what puts parts together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from piper_compiler.capture._torch import OpOverload
from piper_compiler.capture.layouts.loops import At, Inner, Loops, Nest, OpCall, Shape
from piper_compiler.capture.layouts.rules_elementwise import broadcast

aten = torch.ops.aten
OUT = -1
"""The number of the first result."""
ALL = (frozenset({0}),)
"""The op is linear in its one tensor."""


def _takes_shape(name: str) -> Callable[[OpCall, Sequence[Shape]], Mapping[str, Any]]:
    """Return a function that gives the shape of the result's part as an argument."""

    def localize(call: OpCall, results: Sequence[Shape]) -> Mapping[str, Any]:
        return {name: list(results[0])}

    return localize


def _view(name: str, call: OpCall) -> Loops:
    return Loops(((call.dims(0), call.dims(OUT)),), linear=ALL, localize=_takes_shape(name))


def _permuted(call: OpCall, order: Sequence[int]) -> Loops:
    return Loops(tuple(((At(0, d),), (At(OUT, k),)) for k, d in enumerate(order)), linear=ALL)


def _permute(call: OpCall) -> Loops:
    rank = len(call.shape(0))
    return _permuted(call, [int(d) % rank for d in call.get("dims")])


def _transpose(call: OpCall) -> Loops:
    order = list(range(len(call.shape(0))))
    a, b = (int(call.get(name)) % len(order) for name in ("dim0", "dim1"))
    order[a], order[b] = order[b], order[a]
    return _permuted(call, order)


def _t(call: OpCall) -> Loops:
    return _permuted(call, list(range(len(call.shape(0))))[::-1])


def _without_ones(call: OpCall) -> Loops:
    """Return the loops of an op that adds or drops dimensions of size 1."""
    argument, result = ([d for d in call.dims(k) if call.size(d) != 1] for k in (0, OUT))
    return Loops(tuple(((a,), (b,)) for a, b in zip(argument, result, strict=True)), linear=ALL)


def _expand(call: OpCall) -> Loops:
    return Loops(tuple(broadcast(call, 0, OUT)), linear=ALL, localize=_takes_shape("size"))


def _rest(call: OpCall, dim: int, argument: int = 0, result: int = OUT) -> tuple[tuple[Nest, Nest], ...]:
    """Return the dimensions other than `dim`, in which an argument and a result of the same rank are alike."""
    return tuple(((At(argument, d),), (At(result, d),)) for d in range(len(call.shape(argument))) if d != dim)


def _select(call: OpCall) -> Loops:
    rank = len(call.shape(0))
    dim = int(call.get("dim")) % rank
    kept = [d for d in range(rank) if d != dim]
    same = tuple(((At(0, d),), (At(OUT, k),)) for k, d in enumerate(kept))
    return Loops(same, whole=frozenset({At(0, dim)}), linear=ALL)


def span(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Return the first element and the one behind the last of a slice of a dimension, as torch reads them."""
    first, last = (0 if start is None else int(start)), (size if end is None else int(end))
    first, last = (x + size if x < 0 else x for x in (first, last))
    first = min(max(first, 0), size)
    return first, min(max(last, first), size)


def _slice(call: OpCall) -> Loops:
    dim = int(call.get("dim")) % len(call.shape(0))
    size = call.shape(0)[dim]
    first, last = span(size, call.get("start"), call.get("end"))
    taken = last - first
    if int(call.get("step")) != 1 or not taken or size % taken or first % taken:
        return Loops(_rest(call, dim), whole=frozenset({At(0, dim), At(OUT, dim)}), linear=ALL)
    which = Inner(size // taken)
    same = (*_rest(call, dim), ((At(0, dim),), (which, At(OUT, dim))))

    def localize(call: OpCall, results: Sequence[Shape]) -> Mapping[str, Any]:
        part = results[0][dim]
        return {"start": first // taken * part, "end": (first // taken + 1) * part}

    return Loops(same, whole=frozenset({which}), linear=ALL, localize=localize)


def _split(call: OpCall) -> Loops:
    dim = int(call.get("dim")) % len(call.shape(0))
    sizes = {call.shape(-1 - k)[dim] for k in range(len(call.results))}
    rest = tuple(pair for k in range(len(call.results)) for pair in _rest(call, dim, 0, -1 - k))
    if len(sizes) > 1:
        blocked = {At(0, dim), *(At(-1 - k, dim) for k in range(len(call.results)))}
        return Loops(rest, whole=frozenset(blocked), linear=ALL)
    which = Inner(len(call.results))
    same = tuple(((At(0, dim),), (which, At(-1 - k, dim))) for k in range(len(call.results)))

    def localize(call: OpCall, results: Sequence[Shape]) -> Mapping[str, Any]:
        return {"split_size": results[0][dim]}

    return Loops((*rest, *same), whole=frozenset({which}), linear=ALL, localize=localize)


def _cat(call: OpCall) -> Loops:
    parts = [k for k in call.numbers("tensors") if len(call.shape(k)) == len(call.shape(OUT))]  # not torch's empty vectors
    dim = int(call.get("dim")) % len(call.shape(OUT))
    rest = tuple(pair for k in parts for pair in _rest(call, dim, k))
    linear = (frozenset(range(len(call.tensors))),)
    if len({call.shape(k)[dim] for k in parts}) > 1 or len(parts) < len(call.tensors):
        return Loops(rest, whole=frozenset({At(OUT, dim), *(At(k, dim) for k in parts)}), linear=linear)
    which = Inner(len(parts))
    same = tuple(((At(OUT, dim),), (which, At(k, dim))) for k in parts)
    return Loops((*rest, *same), whole=frozenset({which}), linear=linear)


def _stack(call: OpCall) -> Loops:
    dim = int(call.get("dim")) % len(call.shape(OUT))
    others = [d for d in range(len(call.shape(OUT))) if d != dim]
    parts = range(len(call.tensors))
    same = tuple(((At(k, j),), (At(OUT, d),)) for k in parts for j, d in enumerate(others))
    return Loops(same, whole=frozenset({At(OUT, dim)}), linear=(frozenset(parts),))


RULES: dict[OpOverload, Callable[[OpCall], Loops]] = {
    aten.view.default: partial(_view, "size"),
    aten._unsafe_view.default: partial(_view, "size"),
    aten.reshape.default: partial(_view, "shape"),
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.unsqueeze.default: _without_ones,
    aten.squeeze.dim: _without_ones,
    aten.squeeze.dims: _without_ones,
    aten.expand.default: _expand,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
}
