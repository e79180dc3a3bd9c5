"""An optimizer's update: bytes per parameter counted by hand, and kernels."""

import pytest

from piper_simulator import load_cluster
from piper_simulator.durations.updates import BLOCKS, CHUNK, Updated, update_bytes, update_seconds

EAGER, INDUCTOR = load_cluster("h200x1@eager").device, load_cluster("h200x1@inductor").device
N = 10 * BLOCKS * CHUNK
ADAM = Updated(4 * N, 4 * N, 8 * N + 12, 4, 3, False)


def test_a_fused_update_reads_and_writes_once() -> None:
    """float32: parameter 8, two states 16, gradient read 4: 28 bytes per parameter; then 4 to zero the gradient."""
    moved = update_bytes(ADAM, fused=True)
    assert sum(moved) / N == pytest.approx(28 + 4)
    assert len(moved) == 10 + 3, (
        "21 million elements per kernel; a kernel per bucket that zeroes it"
    )
    seconds, launch_s = update_seconds(EAGER, ADAM)
    assert seconds == pytest.approx(32 * N / (4.8e12 * 0.9), rel=1e-3)
    assert launch_s == pytest.approx(14 * 5e-6)


def test_bfloat16_without_states() -> None:
    assert sum(update_bytes(Updated(2 * N, 2 * N, 0, 2, 1, False), fused=True)) / N == 2 * 2 + 2 + 2


def test_a_master_is_read_once_more_and_its_copy_written() -> None:
    mixed = Updated(4 * N, 4 * N, 8 * N, 4, 3, False, (2 * N, 2 * N, 2 * N))
    assert sum(update_bytes(mixed, fused=True)) / N == pytest.approx(28 + 4 + 4 + 2)
    assert len(update_bytes(mixed, fused=True)) == 10 + 3 + 3


def test_operation_by_operation_takes_more() -> None:
    """AdamW: 20 tensors of a parameter's size are read or written, SGD with momentum 8, without 3."""
    moved = [
        sum(update_bytes(Updated(4 * N, 4 * N, s * 4 * N, 4, 1, False), fused=False)) / (4 * N)
        for s in range(4)
    ]
    assert moved == [3 + 1, 8 + 1, 20 + 1, 23 + 1], "and one is set to zero"
    assert len(update_bytes(ADAM, fused=False)) == 8 * 10 + 3
    (unfused, _), (fused, _) = update_seconds(INDUCTOR, ADAM), update_seconds(EAGER, ADAM)
    assert unfused == pytest.approx(84 / 32 * fused, rel=1e-2)


def test_scaled_gradients_are_read_and_written_before() -> None:
    scaled = Updated(4 * N, 4 * N, 8 * N, 4, 3, True)
    assert sum(update_bytes(scaled, fused=True)) / N == pytest.approx(28 + 4 + 8)
    assert len(update_bytes(scaled, fused=True)) == 10 + 3 + 3


def test_little_takes_longer_to_launch() -> None:
    small = Updated(4 * 100, 4 * 100, 8 * 100, 4, 2, False)
    seconds, launch_s = update_seconds(EAGER, small)
    assert seconds < launch_s == pytest.approx(4 * 5e-6), (
        "the update, two zeroes, the number of the step"
    )
    assert update_seconds(EAGER, Updated(0, 0, 0, 4, 1, False)) == (0.0, pytest.approx(5e-6)), (
        "buckets that others hold"
    )
