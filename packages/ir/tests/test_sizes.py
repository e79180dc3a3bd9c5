"""Sizes that are affine in rows are added, multiplied, bound and fitted exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_ir.ground.errors import CaptureError, FormatError
from piper_ir.ground.sizes import ITEM_BYTES, Affine, Dim, TensorSpec, affine, bind, fit
from piper_ir.program.program import Liveness

INTS = st.integers(-(1 << 40), 1 << 40)
DIMS = st.builds(affine, INTS, st.one_of(st.just(0), INTS))


@given(DIMS, DIMS, st.integers(0, 1 << 20))
def test_sums_and_multiples_bind_like_numbers(x: Dim, y: Dim, rows: int) -> None:
    assert bind(x + y, rows) == bind(x, rows) + bind(y, rows)
    assert bind(x * 7, rows) == bind(7 * x, rows) == 7 * bind(x, rows)
    assert bind(x * 0, rows) == 0


@given(DIMS, DIMS)
def test_what_does_not_depend_on_rows_is_an_int(x: Dim, y: Dim) -> None:
    for size in (x, x + y, x * 3, x * 0):
        assert isinstance(size, int) or size.b != 0
    assert isinstance(Affine(5, 2) + Affine(1, -2), int)


@given(INTS, INTS, st.integers(0, 1 << 20))
def test_two_row_counts_determine_a_size(a: int, b: int, rows: int) -> None:
    found = fit(a + 2 * b, a + 3 * b)
    assert found == affine(a, b)
    assert bind(found, rows) == a + b * rows


def test_a_product_of_two_sizes_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"\(2r\) \* \(1\+3r\) is quadratic in the rows"):
        Affine(0, 2) * Affine(1, 3)
    with pytest.raises(CaptureError, match="quadratic"):
        _ = TensorSpec((Affine(0, 1), Affine(0, 1)), "int8").numel


def test_specs_count_elements_and_bytes() -> None:
    spec = TensorSpec((Affine(0, 2), 3, 5), "bfloat16")
    assert spec.numel == Affine(0, 30) and spec.nbytes == Affine(0, 60)
    assert spec.bind(4) == TensorSpec((8, 3, 5), "bfloat16") and spec.bind(4).nbytes == 240
    assert TensorSpec((), "float64").nbytes == 8 and TensorSpec((0, 7), "int64").numel == 0
    assert str(spec) == "bfloat16[2r,3,5]"
    assert {d: TensorSpec((3,), d).nbytes for d in ITEM_BYTES} == {
        d: 3 * n for d, n in ITEM_BYTES.items()
    }


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(
        FormatError, match=r"unknown dtype 'torch\.float32'; known are float64, float32"
    ):
        TensorSpec((1,), "torch.float32")


def test_liveness_frees_dying_inputs_after_their_last_use() -> None:
    live = Liveness((2, 0), ((10,), (4, 25), (30,)))
    assert live.peak({}) == 30
    assert live.peak({2: 8}) == 22  # 10; 25 - 8 = 17; 30 - 8
    assert live.peak({2: 8, 0: 20}) == 17  # the last segment is down to 2
    assert live.peak({1: 99}) == 30  # an input that is not listed is never freed early
    assert live.peak({2: 50, 0: 50}) == 10
    assert Liveness().peak({}) == 0


def test_liveness_binds_to_the_largest_of_each_segment() -> None:
    live = Liveness((0,), ((Affine(100, 1), Affine(0, 30)), ()))
    assert live.bind(2) == Liveness((0,), ((102,), (0,)))
    assert live.bind(10) == Liveness((0,), ((300,), (0,)))
