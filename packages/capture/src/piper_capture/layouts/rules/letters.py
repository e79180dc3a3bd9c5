"""Write the loops of an op as letters: a name for each dimension of its tensors, as in the notation of einsum."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from piper_capture.layouts.loops import DimOf, Localize, Loops, OpCall, unchanged

OUT = -1
"""The number of the first result."""
Names = Sequence[str | None]
"""A name for each dimension of a tensor; None for one that cannot be sharded and that no other tensor has."""


def lettered(
    names: Mapping[int, Names],
    *,
    summed: Collection[str] = (),
    whole: Collection[str] = (),
    linear: tuple[frozenset[int], ...] = (),
    localize: Localize = unchanged,
) -> Loops:
    """Return the loops of an op whose dimensions of equal names run over the same steps."""
    places: dict[str, list[DimOf]] = {}
    alone: set[DimOf] = set()
    for tensor, dim_names in names.items():
        for dim, name in enumerate(dim_names):
            if name is None:
                alone.add(DimOf(tensor, dim))
            else:
                places.setdefault(name, []).append(DimOf(tensor, dim))
    same = tuple(((first,), (other,)) for first, *others in places.values() for other in others)

    def of(chosen: Collection[str]) -> frozenset[DimOf]:
        return frozenset(at for name in chosen for at in places.get(name, ()))

    return Loops(same, of(summed), of(whole) | alone, linear, localize)


def numbered(count: int, without: Collection[int] = ()) -> list[str | None]:
    """Return names for the dimensions of a tensor by their places, None for those in `without`."""
    return [None if d in without else str(d) for d in range(count)]


def each(*tensors: int) -> tuple[frozenset[int], ...]:
    """Return that an op is linear in each of some tensors by itself."""
    return tuple(frozenset({k}) for k in tensors)


def rank(call: OpCall, tensor: int) -> int:
    """Return the number of dimensions of a tensor."""
    return len(call.shape(tensor))


def place(call: OpCall, tensor: int, name: str) -> int:
    """Return a dimension that an argument names, counted from 0; 0 also for a tensor without dimensions."""
    return int(call.get(name)) % max(1, rank(call, tensor))


def all_whole(call: OpCall) -> Loops:
    """Return the loops of an op that cannot be sharded."""
    return Loops(whole=frozenset(at for k in call.every() for at in call.dims(k)))
