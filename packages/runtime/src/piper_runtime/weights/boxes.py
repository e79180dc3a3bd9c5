"""Cut flat ranges of tensors into boxes: a shard of a flat buffer is a range, and a checkpoint keeps true shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Box:
    """Describe a rectangular piece of a tensor by its first index and its size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.sizes)

    def inside(self, shape: tuple[int, ...]) -> bool:
        """Return whether the box is a piece of a tensor of this shape."""
        if not len(shape) == len(self.offsets) == len(self.sizes):
            return False
        return all(
            o >= 0 and s >= 0 and o + s <= n
            for o, s, n in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def overlap(self, other: Box) -> Box | None:
        """Return the overlap of two boxes of one tensor, None if it is empty."""
        first = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        sizes = tuple(min(a + n, b + m) - f for f, (a, n, b, m) in zip(first, ends, strict=True))
        return Box(first, sizes) if all(size > 0 for size in sizes) else None

    def with_next(self, other: Box) -> Box | None:
        """Return this box and the other as one box, None unless that holds this box's elements and then the other's."""
        k = next(
            (k for k, (a, b) in enumerate(zip(self.offsets, other.offsets, strict=True)) if a != b),
            None,
        )
        if k is None or any(n != 1 for n in (*self.sizes[:k], *other.sizes[:k])):
            return None
        alike = (
            self.offsets[k + 1 :] == other.offsets[k + 1 :]
            and self.sizes[k + 1 :] == other.sizes[k + 1 :]
        )
        if not alike or self.offsets[k] + self.sizes[k] != other.offsets[k]:
            return None
        return Box(
            self.offsets, (*self.sizes[:k], self.sizes[k] + other.sizes[k], *self.sizes[k + 1 :])
        )

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the index that takes this box out of a tensor that holds the box `outer`."""
        return tuple(
            slice(o - p, o - p + s)
            for o, p, s in zip(self.offsets, outer.offsets, self.sizes, strict=True)
        )


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box of all elements of a tensor."""
    return Box((0,) * len(shape), shape)


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return boxes that hold the elements [start, stop) of a tensor in row-major order.

    They are disjoint, each of them is one range of these elements, and they come in that order. There are at most 2 *
    ndim - 1 of them: the rest of a row, whole rows, and the beginning of a row, in every dimension but the last one.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(
            f"[{start}, {stop}) is no range of the {prod(shape)} elements of a tensor of shape {list(shape)}"
        )
    return _boxes((), shape, start, stop) if start < stop else []


def boxes_of_ranges(shape: tuple[int, ...], ranges: Iterable[tuple[int, int]]) -> list[Box]:
    """Return the boxes of several ranges [start, stop), in their order; boxes that make a larger one are joined.

    So the columns that a device has of a matrix are one box, and not one for each row.
    """
    boxes: list[Box] = []
    for start, stop in ranges:
        for box in boxes_of_range(shape, start, stop):
            boxes.append(box)
            while len(boxes) > 1 and (both := boxes[-2].with_next(boxes[-1])) is not None:
                boxes[-2:] = [both]
    return boxes


def _boxes(before: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Cut a range of a tensor that is the row `before` of a larger one, which has len(before) dimensions more."""
    fixed = (1,) * len(before)
    if not shape:
        return [Box(before, fixed)]
    row, rest = prod(shape[1:]), shape[1:]
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        return _boxes((*before, first), rest, start - first * row, stop - first * row)
    boxes = []
    if start % row:
        boxes += _boxes((*before, first), rest, start % row, row)
        first += 1
    end = stop // row
    if first < end:
        boxes.append(Box((*before, first, *(0 for _ in rest)), (*fixed, end - first, *rest)))
    if stop % row:
        boxes += _boxes((*before, end), rest, 0, stop % row)
    return boxes
