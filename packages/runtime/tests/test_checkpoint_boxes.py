"""Flat ranges as boxes: they hold each element once, in order, and there are few of them."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piper_runtime.weights.boxes import Box, boxes_of_range, boxes_of_ranges, whole

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


def cut(shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """Return the flat indices that a box holds, in the box's own order."""
    return torch.arange(prod(shape)).view(shape)[box.within(whole(shape))].reshape(-1)


@given(ranges())
def test_boxes_hold_a_range_once_and_in_order(found: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = found
    boxes = boxes_of_range(shape, start, stop)
    assert all(box.inside(shape) and box.numel for box in boxes)
    assert [int(i) for box in boxes for i in cut(shape, box)] == list(range(start, stop))


@given(ranges())
def test_there_are_at_most_two_boxes_per_dimension_but_one(
    found: tuple[tuple[int, ...], int, int],
) -> None:
    shape, start, stop = found
    assert len(boxes_of_range(shape, start, stop)) <= max(1, 2 * len(shape) - 1)


def test_the_bound_is_reached_and_whole_tensors_are_one_box() -> None:
    assert (
        len(boxes_of_range((3, 3, 3), 1, 26)) == 5 and len(boxes_of_range((3, 3, 3, 3), 1, 80)) == 7
    )
    for shape in ((), (7,), (2, 3), (4, 1, 5)):
        assert boxes_of_range(shape, 0, prod(shape)) == [whole(shape)]
    assert boxes_of_range((2, 0), 0, 0) == []


@given(ranges(), st.data())
def test_shards_of_one_size_are_read_from_shards_of_another(
    found: tuple[tuple[int, ...], int, int], data: st.DataObject
) -> None:
    """The overlaps of two ways to cut a tensor bring every element of a range to its place."""
    shape, start, stop = found
    n = prod(shape)
    edges = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=4))})
    stored = [box for a, b in pairwise(edges) for box in boxes_of_range(shape, a, b)]
    out, at = torch.full((stop - start,), -1), 0
    for box in boxes_of_range(shape, start, stop):
        target = out[at : at + box.numel].view(box.sizes)
        for piece in stored:
            common = box.overlap(piece)
            if common is not None:
                target[common.within(box)] = cut(shape, piece).view(piece.sizes)[
                    common.within(piece)
                ]
        at += box.numel
    assert out.tolist() == list(range(start, stop))


@given(SHAPES, st.data())
def test_boxes_of_several_ranges_hold_them_in_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    edges = sorted(data.draw(st.lists(st.integers(0, prod(shape)), max_size=10)))
    ranges = list(zip(edges[::2], edges[1::2], strict=False))
    boxes = boxes_of_ranges(shape, ranges)
    assert all(box.inside(shape) and box.numel for box in boxes)
    assert [int(i) for box in boxes for i in cut(shape, box)] == [
        i for a, b in ranges for i in range(a, b)
    ]


def test_the_columns_of_a_matrix_are_one_box() -> None:
    """What a device has of a weight that is shared along its last dimension, and along one between others."""
    assert boxes_of_ranges((6, 8), [(8 * row + 4, 8 * row + 8) for row in range(6)]) == [
        Box((0, 4), (6, 4))
    ]
    rows = [(24 * a + 8 * b + 2, 24 * a + 8 * b + 4) for a in range(2) for b in range(3)]
    assert boxes_of_ranges((2, 3, 8), rows) == [Box((0, 0, 2), (2, 3, 2))]
    assert boxes_of_ranges((3, 4), [(0, 2), (5, 7), (8, 10)]) == [
        Box((0, 0), (1, 2)),
        Box((1, 1), (1, 2)),
        Box((2, 0), (1, 2)),
    ]
    assert boxes_of_ranges((2, 8), [(4, 8), (8, 12)]) == [Box((0, 4), (1, 4)), Box((1, 0), (1, 4))]


def test_what_is_no_range_is_refused() -> None:
    for start, stop in ((-1, 2), (3, 2), (0, 7)):
        with pytest.raises(ValueError, match="is no range of the 6 elements"):
            boxes_of_range((2, 3), start, stop)


def test_boxes_apart_share_nothing_and_a_box_outside_is_seen() -> None:
    assert Box((0, 0), (2, 2)).overlap(Box((2, 0), (1, 2))) is None
    assert Box((), ()).overlap(Box((), ())) == Box((), ())
    assert (
        not Box((1,), (3,)).inside((3,))
        and not Box((-1,), (2,)).inside((3,))
        and not Box((0,), (1,)).inside((1, 1))
    )
