"""Name the places at which a nest of indexes is cut, so that they are found again once the dimensions are cut there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from piper_capture.layouts.indexes import Indexed, LoopIndex, OverlappingCuts, TensorKey
from piper_capture.layouts.names import Nested


@dataclass(frozen=True)
class NestPlace:
    """Name a factor of a dimension by the size of the factors inside of it."""

    key: TensorKey
    dim: int
    inner: int
    size: int


def nest_places(indexes: Indexed, nest: Nested, degrees: Sequence[int]) -> Iterator[NestPlace]:
    """Yield where each part of the axis cuts the nest."""
    key, dim = next(
        (k, d)
        for k, dims in indexes.tensors.items()
        for d, inside in enumerate(dims)
        if has_nest(inside, nest)
    )
    inside = indexes.tensors[key][dim]
    start = inside.index(nest[0])
    left = prod(i.size for i in inside[start:])
    for degree in degrees:
        left //= degree
        yield NestPlace(key, dim, left, degree)


def has_nest(inside: Nested, nest: Nested) -> bool:
    """Return whether the indexes of a nest stand in a dimension, next to each other."""
    return any(inside[k : k + len(nest)] == nest for k in range(len(inside)))


def index_at(indexes: Indexed, place: NestPlace) -> LoopIndex:
    """Return the index at a place of a dimension that has been cut there; raise OverlappingCuts if there is none."""
    inner = 1
    for index in reversed(indexes.tensors[place.key][place.dim]):
        if inner == place.inner and index.size == place.size:
            return index
        inner *= index.size
    raise OverlappingCuts
