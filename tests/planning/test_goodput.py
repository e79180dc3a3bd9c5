"""The share of time that failures leave is Young's, and the interval between checkpoints the one that loses least."""

from __future__ import annotations

import pytest

from piper.planning.goodput import Failures, goodput, saved_bytes
from tests.helpers.cases import each_case


def lost(failures: Failures, stopped_s: float, every_s: float) -> float:
    """The share of time that is lost with a checkpoint every so many seconds, from the definition."""
    redone = every_s / 2 + failures.restart_s
    return stopped_s / every_s + redone / failures.mtbf_s


def test_it_is_the_sum_of_what_is_lost() -> None:
    failures = Failures(mtbf_s=10_000.0, bytes_per_s=1e9, restart_s=100.0)
    found = goodput(failures, 8 * 10**9)
    assert found.every_s == pytest.approx(400.0)  # sqrt(2 x 8 x 10,000)
    assert found.share == pytest.approx(1 - (8 / 400 + 200 / 10_000 + 100 / 10_000))


@each_case("factor", [0.5, 0.9, 1.1, 2.0])
def test_no_other_interval_loses_less(factor: float) -> None:
    failures = Failures(mtbf_s=3_600.0)
    found = goodput(failures, 20 * 10**9)
    assert lost(failures, 20.0, factor * found.every_s) > 1 - found.share


def test_masters_are_saved_and_not_their_copies() -> None:
    assert saved_bytes({"param": 2, "master": 4, "optim": 8, "grad": 16}) == 12
    assert saved_bytes({"param": 4, "optim": 8, "activation": 16}) == 12


def test_what_fails_at_once_keeps_nothing() -> None:
    assert goodput(Failures(mtbf_s=1.0), 10**12).share == 0.0
    assert goodput(Failures(mtbf_s=1e9, restart_s=0.0), 10**9).share > 0.999
