"""Measured kernels: what is exact, interpolated, scaled by the nearest, or left to the formula; and that predictions
say so."""

from dataclasses import replace
from math import exp, log
from pathlib import Path

import pytest

from piper_ir.ground.errors import ClusterError
from piper_ir.program.program import Cost, Kernel
from piper_simulator import load_cluster
from piper_simulator.cluster.kernel_table import Found, KernelDuration, KernelTable
from piper_simulator.durations.kernels import by_kind, kernel_seconds, step_took

EAGER = load_cluster("h200x1@eager").device


def matmul(*dims: int, seconds: float = 0.0, op: str = "mm") -> Kernel:
    *batch, m, n, k = dims
    flops = 2 * m * n * k * (batch[0] if batch else 1)
    return Kernel("matmul", dims, "bfloat16", flops, 2 * (m * k + k * n + m * n), op=op)


def row(
    size: tuple[int, ...], seconds: float, axis: str = "shape", kind: str = "matmul", op: str = ""
) -> KernelDuration:
    return KernelDuration(kind, op, "bfloat16", axis, size, seconds, "here")  # type: ignore[arg-type]  # an axis by name


def moving(nbytes: int, op: str = "add", dtype: str = "bfloat16") -> Kernel:
    return Kernel("elementwise", (), dtype, nbytes, nbytes, op=op)


def simple(kernel: Kernel) -> float:
    return kernel.flops * 1e-12 + 1e-9 * kernel.bytes  # type: ignore[operator]  # bound


def test_what_was_measured_is_taken() -> None:
    table = KernelTable((row((64, 64, 64), 7e-6), row((2, 64, 64, 64), 9e-6)))
    assert table.find(matmul(64, 64, 64), simple) == Found(7e-6, "table")
    assert table.find(matmul(2, 64, 64, 64), simple) == Found(9e-6, "table"), (
        "a batched product is another shape"
    )
    other = replace(matmul(64, 64, 64), dtype="float32")
    assert table.find(other, simple) == Found(simple(other), "formula"), "another dtype"


def test_between_sizes_a_line_on_log_log_paper() -> None:
    """Bytes x 4 take x 9: twice the bytes three times as long."""
    table = KernelTable(
        tuple(
            row((b,), s, "bytes", "elementwise")
            for b, s in ((100, 1e-6), (400, 9e-6), (40_000, 1e-3))
        )
    )
    found = table.find(moving(200), simple)
    assert found.seconds == pytest.approx(3e-6) and found.how == "interpolated"
    assert table.find(moving(400), simple) == Found(9e-6, "table")


def test_nothing_is_extrapolated_silently() -> None:
    """To twice beyond, the formula by what the nearest took over its own; further away the formula alone."""
    table = KernelTable(
        (row((100,), 1e-6, "bytes", "elementwise"), row((400,), 9e-6, "bytes", "elementwise"))
    )
    twice = table.find(moving(800), simple)
    assert (
        twice.seconds == pytest.approx(simple(moving(800)) * 9e-6 / simple(moving(400)))
        and twice.how == "scaled"
    )
    assert table.find(moving(50), simple).seconds == pytest.approx(
        simple(moving(50)) * 1e-6 / simple(moving(100))
    )
    for outside in (49, 801):
        assert table.find(moving(outside), simple) == Found(simple(moving(outside)), "formula")
    assert table.find(moving(0), simple) == Found(0.0, "formula"), (
        "nothing to move, no logarithm of it"
    )


def test_a_shape_between_its_neighbours() -> None:
    """On the middle between two shapes: the formula by the geometric mean of their measured / formula."""
    a, b, x = matmul(64, 64, 64), matmul(256, 64, 64), matmul(128, 64, 64)
    table = KernelTable((row((64, 64, 64), 2 * simple(a)), row((256, 64, 64), 8 * simple(b))))
    found = table.find(x, simple)
    assert found.seconds == pytest.approx(4 * simple(x)) and found.how == "interpolated"
    closer = KernelTable(
        (row((64, 64, 64), 2 * simple(a)), row((144, 64, 64), 8 * simple(matmul(144, 64, 64))))
    )
    weights = log(80 / 64) ** -2, log(144 / 80) ** -2
    mean = (weights[0] * log(2) + weights[1] * log(8)) / sum(weights)
    at_80 = closer.find(matmul(80, 64, 64), simple)
    assert at_80.seconds == pytest.approx(exp(mean) * simple(matmul(80, 64, 64))), (
        "the nearer weighs more"
    )
    wider = table.find(matmul(128, 128, 64), simple)
    assert wider.how == "scaled", "no neighbour is as wide"
    assert table.find(matmul(128, 256, 64), simple).how == "formula", "too wide to be a neighbour"


def test_a_shape_of_attention_is_that_of_full_attention() -> None:
    """A window of 128 of 4096 keys is found by its FLOPs; MLA, whose values are narrower than its keys, by its shape."""
    dims, dtype = (1, 8, 4096, 4096, 192), "bfloat16"
    full = row(dims, 1e-3, kind="attention")
    for op, keys, values in (("attention", 1, 1), ("attention_dgrad", 3, 2)):
        latent = 8 * 4096 * 4096 * (keys * 192 + values * 128)
        near = latent * 128 * (2 * 4096 - 128) // 4096**2
        mla, windowed = (Kernel("attention", dims, dtype, f, 1000, op=op) for f in (latent, near))
        table = KernelTable((full,))
        assert table.find(mla, simple).how == "table"
        assert table.find(windowed, simple) == Found(simple(windowed), "formula")
        measured = row((near,), 1e-4, "flops", "attention")
        assert KernelTable((full, measured)).find(windowed, simple) == Found(1e-4, "table")


def test_an_operators_rows_come_before_those_of_its_kind() -> None:
    table = KernelTable(
        (
            row((100,), 1e-6, "bytes", "elementwise"),
            row((100,), 5e-6, "bytes", "elementwise", "cat"),
        )
    )
    assert [table.find(moving(100, op), simple).seconds for op in ("add", "cat")] == [1e-6, 5e-6]
    flops = KernelTable((row((100,), 1e-6, "flops", "elementwise"),))
    assert flops.find(replace(moving(50), flops=100), simple) == Found(1e-6, "table")


def test_a_matmul_is_scaled_by_its_waves() -> None:
    """Twice as long as the formula says, at a neighbour: twice the formula, with the waves of its own shape."""
    near, x = matmul(4096, 2048, 2048), matmul(4096, 2176, 2048)
    measured = replace(EAGER, kernels=(row((4096, 2048, 2048), 2 * by_kind(EAGER, near, "F")),))
    found = kernel_seconds(measured, x, "F")
    assert found.how == "scaled" and found.seconds == pytest.approx(2 * by_kind(EAGER, x, "F"))


def test_a_step_is_labelled_by_its_least_trusted_kernel() -> None:
    a, b = matmul(64, 64, 64), moving(200)
    exact = replace(
        EAGER, kernels=(row((64, 64, 64), 1e-3), row((200,), 1e-4, "bytes", "elementwise"))
    )
    took = step_took(exact, Cost((replace(a, count=2), b)), "F")
    assert took.source == "table" and took.seconds == pytest.approx(2.1e-3)
    assert took.parts == {"table": pytest.approx(2.1e-3)}
    assert step_took(exact, Cost((a, replace(b, bytes=300))), "F").source == "formula", (
        "scaled by the nearest is a formula"
    )
    assert (
        step_took(EAGER, Cost((a, b)), "F").source
        == step_took(exact, Cost(()), "F").source
        == "formula"
    )
    between = replace(exact, kernels=(*exact.kernels, row((400,), 1e-4, "bytes", "elementwise")))
    assert step_took(between, Cost((a, replace(b, bytes=300))), "F").source == "interpolated"


def test_a_file_holds_them(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    text = 'device = "h200-141g-sxm"\nstack = "eager"\n'
    text += '[[kernel]]\nkind = "norm"\nop = "layer_norm"\ndtype = "bfloat16"\nbytes = 1000\nseconds = 1e-5\nsource = "me"\n'
    path.write_text(text)
    found = load_cluster(path)
    assert found.device.kernels == (
        KernelDuration("norm", "layer_norm", "bfloat16", "bytes", (1000,), 1e-5, "me"),
    )
    assert all(not load_cluster(name).device.kernels for name in ("h200x1", "h200x1@eager")), (
        "built in: by formula only"
    )


def test_impossible_rows_are_refused() -> None:
    for size, seconds in (((0,), 1.0), ((), 1.0), ((5,), 0.0), ((5,), float("nan"))):
        with pytest.raises(
            ClusterError, match=r"a whole number from 1 on|positive whole numbers|a number above 0"
        ):
            row(size, seconds, "bytes", "norm")
