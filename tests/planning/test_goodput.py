"""The share of time that failures leave is that of random failures, and the interval the one that keeps most."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest

from piper.planning.goodput import Failures, goodput, saved_bytes
from tests.helpers.cases import each_case


def kept(failures: Failures, stopped_s: float, every_s: float) -> float:
    """The share of time that is kept with a checkpoint after so many seconds of work."""
    mean = failures.mtbf_s
    return every_s / (
        mean * exp(failures.restart_s / mean) * (exp((every_s + stopped_s) / mean) - 1)
    )


def test_it_is_the_share_of_failures_drawn_at_random() -> None:
    """Play a training of 200,000 intervals, each tried until no failure comes before its checkpoint."""
    failures = Failures(mtbf_s=2_000.0, bytes_per_s=1e9, restart_s=100.0)
    found = goodput(failures, 30 * 10**9)
    draws = np.random.default_rng(0)
    total, need = 0.0, found.every_s + 30.0
    for _ in range(200_000):
        while (failed := draws.exponential(failures.mtbf_s)) < need:
            total += failed
            while (again := draws.exponential(failures.mtbf_s)) < failures.restart_s:
                total += again
            total += failures.restart_s
        total += need
    assert found.share == pytest.approx(200_000 * found.every_s / total, rel=0.01)


def test_few_failures_leave_what_young_says() -> None:
    """Young says that C / T + T / 2 M + R / M are lost to first order, where T is sqrt(2 C M)."""
    found = goodput(Failures(mtbf_s=10_000.0, bytes_per_s=1e9, restart_s=100.0), 8 * 10**9)
    assert found.every_s == pytest.approx(400.0, rel=0.02)
    assert found.share == pytest.approx(1 - (8 / 400 + 200 / 10_000 + 100 / 10_000), abs=0.002)


@each_case("factor", [0.8, 0.9, 1.1, 1.25])
@pytest.mark.parametrize("stopped_s", [5.0, 400.0])
def test_no_other_interval_keeps_more(factor: float, stopped_s: float) -> None:
    failures = Failures(mtbf_s=3_600.0)
    found = goodput(failures, int(stopped_s * 10**9))
    assert kept(failures, stopped_s, factor * found.every_s) < found.share


def test_masters_are_saved_and_not_their_copies() -> None:
    assert saved_bytes({"param": 2, "master": 4, "optim": 8, "grad": 16}) == 12
    assert saved_bytes({"param": 4, "optim": 8, "activation": 16}) == 12


def test_what_fails_at_once_keeps_nothing() -> None:
    assert goodput(Failures(mtbf_s=1.0), 10**12).share == 0.0
    assert goodput(Failures(mtbf_s=1e9, restart_s=0.0), 10**9).share > 0.999
