"""Lines on log-log paper go through the points, are exact for powers, and end just beyond the points."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from piper_ir.tools import REACH, log_log, within


@given(st.floats(0.1, 3.0), st.floats(1e-9, 1e3), st.integers(1, 4000))
def test_a_power_of_x_is_met_exactly(power: float, factor: float, x: int) -> None:
    points = [(n, factor * n**power) for n in (1, 10, 100, 2000)]
    assert log_log(points, x) == pytest.approx(factor * x**power, rel=1e-9)


@given(st.lists(st.floats(0.0, 1e3), min_size=2, max_size=5), st.integers(1, 200))
@example([0.0, 0.0, 0.0, 2.0, 5e-324], 65)
@example([0.0, 1.1125369292536007e-308, 2.0], 5)
def test_between_two_points_it_stays_between_them(ys: list[float], x: int) -> None:
    points = [(4**k, y) for k, y in enumerate(ys)]
    if not within(points, x):
        return
    left = max((p for p in points if p[0] <= x), key=lambda p: p[0])
    right = min((p for p in points if p[0] >= x), key=lambda p: p[0])
    low, high = sorted((left[1], right[1]))
    found = log_log(points, x)
    assert found is not None and low * (1 - 1e-9) <= found <= high * (1 + 1e-9)


def test_nothing_is_known_beyond_the_reach_or_between_no_two_points() -> None:
    points = [(10, 1.0), (20, 2.0)]
    assert [log_log(points, x) for x in (4, 41)] == [None, None]
    assert log_log(points, 5) == pytest.approx(0.5) and log_log(points, 40) == pytest.approx(4.0)
    assert (
        log_log([(10, 1.0)], 11) is None
        and log_log([(10, 1.0)], 10) == 1.0
        and log_log([], 1) is None
    )


def test_the_reach_keeps_the_error_of_an_affine_time_below_what_is_said() -> None:
    """The docstring's numbers hold for a + b x, continued from x / 2 and x to 2 x, and to 4 x, at its worst."""

    def error(beyond: float) -> float:
        worst = 0.0
        for percent in range(1, 2000):
            b = percent / 100_000
            points = [(500, 1 + 500 * b), (1000, 1 + 1000 * b)]
            slope = log_log(points, 2000)
            assert slope is not None
            at = points[1][1] * (slope / points[1][1]) ** (1 if beyond == 2 else 2)
            worst = max(worst, 1 - at / (1 + 1000 * beyond * b))
        return worst

    assert REACH == 2.0 and error(2) == pytest.approx(0.11, abs=0.005)
    assert error(4) == pytest.approx(0.29, abs=0.015)
