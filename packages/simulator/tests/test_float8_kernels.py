"""Protect the durations of float8: a rate of its own on each device, and passes that stacks join up to a scale."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piper_ir.ground.errors import ClusterError
from piper_ir.program.program import Cost, Kernel
from piper_simulator import StackConstant, load_cluster
from piper_simulator.cluster.software import device_with
from piper_simulator.cluster.stacks import STACKS
from piper_simulator.durations.kernels import guessed_rates, plain
from piper_simulator.durations.software_kernels import run_kernels

PRODUCT = Kernel("matmul", (8192, 8192, 8192), "bfloat16", 2 * 8192**3, 0)
NARROW = replace(PRODUCT, dtype="float8")
H100 = load_cluster("h100x1").device


def passing(op: str, dtype: str, nbytes: int) -> Kernel:
    return Kernel("elementwise", (), dtype, 0, nbytes, op=op)


def test_products_have_the_rate_and_the_fraction_of_float8() -> None:
    assert plain(H100, NARROW) == pytest.approx(2 * 8192**3 / (1979e12 * 0.709))
    assert plain(H100, PRODUCT) / plain(H100, NARROW) == pytest.approx(1.767, rel=1e-3)


def test_a_stack_that_reaches_less_reaches_less_of_both() -> None:
    lower = device_with(H100, {"matmul": StackConstant(0.803 / 2, 0.1, 1.0, 0.8, "a test")})
    assert plain(lower, NARROW) == pytest.approx(2 * plain(H100, NARROW))


@pytest.mark.parametrize("name", ["a100x1", "a100-40g:1"])
def test_a_device_without_a_rate_is_refused(name: str) -> None:
    with pytest.raises(ClusterError, match="has no FLOP/s for float8"):
        guessed_rates(load_cluster(name).device, Cost((NARROW,)))
    assert guessed_rates(load_cluster("b200x1").device, Cost((NARROW,))) == ()


def test_a_scale_ends_the_run_of_kernels_that_a_stack_joins() -> None:
    """The kernel that makes a tensor finds its largest magnitude, too; the conversion reads the tensor again."""
    before, scale, cast = (
        passing("silu", "bfloat16", 400),
        passing("float8_scale", "float32", 204),
        passing("float8_cast", "float32", 300),
    )
    ran = run_kernels(STACKS["hopper-torch-compile"], [before, scale, cast, NARROW], "F")
    assert [k.op for k in ran] == ["silu", "float8_cast", ""]
