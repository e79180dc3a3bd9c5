"""What operators launch in eager torch: passes and bytes of cross-entropy as counted by hand, and the times that
follow."""

from dataclasses import replace

import pytest

from piper_ir.program.program import Cost, Kernel
from piper_simulator import load_cluster
from piper_simulator.durations.eager_launches import SLICE, Launched, launched_by_torch
from piper_simulator.durations.kernels import by_kind, launch_count, step_took

H200, *_STARTED = (load_cluster(f"h200x1{stack}").device for stack in ("", "@eager", "@inductor"))
EAGER, FUSED = (replace(device, kernel_s=0.0) for device in _STARTED)
ROWS, CLASSES = 4096, 32_768
LOGITS = ROWS * CLASSES
FORWARD = Kernel(
    "loss", (ROWS, CLASSES), "bfloat16", 4 * LOGITS, 2 * LOGITS + 49_154, op="cross_entropy"
)
GRADIENT = Kernel(
    "loss", (ROWS, CLASSES), "bfloat16", 3 * LOGITS, 4 * LOGITS + 49_154, op="cross_entropy_dgrad"
)


def per_logit(kernel: Kernel) -> float:
    rows, classes = kernel.dims
    return sum(b * n for b, n in launched_by_torch(kernel).moved) / (rows * classes)  # type: ignore[operator]  # bound


def test_cross_entropy_goes_over_float32_copies() -> None:
    """bfloat16: conversion 2 + 4, softmax 3 x 4 + 4. Its gradient: difference 2 + 4, exp 4 + 4, product 4 + 2."""
    assert (per_logit(FORWARD), per_logit(GRADIENT)) == (22, 20)
    half, single, double = (replace(FORWARD, dtype=d) for d in ("float16", "float32", "float64"))
    assert [per_logit(k) for k in (half, single, double)] == [3 * 2 + 4, 16, 32], (
        "float16 is converted within the softmax"
    )
    half, single, double = (replace(GRADIENT, dtype=d) for d in ("float16", "float32", "float64"))
    assert [per_logit(k) for k in (half, single, double)] == [20, 16 + 8, 32 + 16]


def test_a_part_of_a_vocabulary_is_looked_for_by_small_kernels() -> None:
    """As torch's dispatcher counts them in `piper_ops.pointwise.vocabulary`.

    It counts 33 of the loss's part and 32 of its gradient, for one slice
    in float32, and for two in bfloat16 43 and 36."""
    parts = [
        replace(k, op=f"cross_entropy_part{end}")
        for k, end in ((FORWARD, ""), (GRADIENT, "_dgrad"))
    ]
    one = [replace(k, dims=(64, 100), dtype="float32") for k in parts]
    two = [replace(k, dims=(2 * SLICE // CLASSES, CLASSES)) for k in parts]
    assert [launched_by_torch(k).count for k in (*one, *two)] == [33, 32, 43, 36]
    assert [per_logit(k) for k in parts] == [2 + (2 + 4) + 8 + 4, (2 + 4) + 8 + (4 + 2)]


def test_a_short_row_is_read_once() -> None:
    """A block has 48 KiB, less 128 bytes: 12,255 numbers of float32, in loads of 16 bytes."""
    reads = {
        c: per_logit(replace(FORWARD, dims=(ROWS, c), dtype="float32")) / 4 - 1
        for c in (1000, 1001, 1025, 12_252, 12_256)
    }
    assert reads == {1000: 1, 1001: 1, 1025: 3, 12_252: 1, 12_256: 3}


def test_the_last_slice_has_what_is_left() -> None:
    rows = SLICE // CLASSES
    one, two = (launched_by_torch(replace(GRADIENT, dims=(r, CLASSES))) for r in (rows, rows + 1))
    assert one.moved == tuple((each * SLICE, 1) for each in (6, 8, 6))
    assert two.moved == tuple(
        (each * logits, 1) for each in (6, 8, 6) for logits in (SLICE, CLASSES)
    )
    assert one.count == 3 + 6 + 2 and two.count == 6 + 6 + 4


def test_its_time_is_that_of_its_bytes() -> None:
    """Of 4.8 TB/s 90 % from 100 MB on: the pieces here have 100 MB and more (Calculon's steps)."""
    forward, gradient = (
        by_kind(EAGER, FORWARD, "F"),
        by_kind(EAGER, GRADIENT, "I"),
    )
    assert forward == pytest.approx(22 * LOGITS / (4.8e12 * 0.9)) and gradient == pytest.approx(
        20 * LOGITS / (4.8e12 * 0.9)
    )
    assert by_kind(FUSED, FORWARD, "F") == pytest.approx(FORWARD.bytes / (4.8e12 * 0.9)), (
        "once, in a fused kernel"
    )
    a100 = replace(load_cluster("a100x1@eager").device, kernel_s=0.0)
    assert by_kind(a100, FORWARD, "F") == pytest.approx(22 * LOGITS / (2e12 * 0.91))


def test_every_kernel_is_launched() -> None:
    """Eight slices: two passes and six small kernels each, and six at the end; without a stack it is one."""
    cost = Cost((replace(FORWARD, count=2),))
    assert (
        launch_count(EAGER, cost) == 2 * (8 * (2 + 6) + 6)
        and launch_count(H200, cost) == launch_count(FUSED, cost) == 2
    )
    took = step_took(replace(EAGER, launch_s=1e-4), cost, "F")
    assert took.seconds == pytest.approx(2 * by_kind(EAGER, FORWARD, "F"))
    assert took.launch_s == pytest.approx(140e-4)


def test_a_layer_norms_gradients_come_from_two_kernels() -> None:
    n = 2 * 10**8  # bytes of x; statistics are small beside it
    both = Kernel("norm", (), "bfloat16", 0, 3 * n, op="layer_norm_backward")
    assert launched_by_torch(both).moved == ((3 * n, 1), (2 * n, 1)), (
        "x, gradient and result; x and gradient again"
    )
    assert by_kind(EAGER, both, "I") == pytest.approx(5 * n / (4.8e12 * 0.9))
    assert launched_by_torch(replace(both, op="rms_norm_dgrad")).moved == ((3 * n, 1),)


def test_a_running_sum_waits_for_each_load_of_its_column() -> None:
    """Of 2,048 numbers for each of 4 rows and 4 experts, made of booleans: a conversion, and 2,048 loads one after the
    other."""
    n = 4 * 2048 * 4
    scan = Kernel("elementwise", (4, 2048, 4), "int32", n, n + 4 * n, op="cumsum")
    assert launched_by_torch(scan) == Launched(((5 * n, 1),), small=1, loads=2048)
    assert by_kind(EAGER, scan, "F") == pytest.approx(2048 * 370e-9)
    same, last = replace(scan, bytes=8 * n), replace(scan, dims=(16, 2048, 1), bytes=8 * n)
    assert launched_by_torch(same) == Launched(((8 * n, 1),), loads=2048)
    assert launched_by_torch(last) == Launched(((8 * n, 1),)), (
        "threads share a row that lies in one piece"
    )
    assert [
        launched_by_torch(replace(same, op=op)).count for op in ("topk", "scatter", "gather")
    ] == [2, 2, 1]
