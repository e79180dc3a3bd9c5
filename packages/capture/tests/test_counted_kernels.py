"""Equal kernels of a step are counted together where nothing else is between them, so that their order is kept."""

from __future__ import annotations

from dataclasses import replace

from piper_capture.steps.kernels import counted
from piper_ir.program.program import Cost, Kernel

ADD = Kernel("elementwise", (), "bfloat16", 0, 1000, op="add")
MUL, NORM, PRODUCT = replace(ADD, op="mul"), replace(ADD, kind="norm"), replace(ADD, kind="matmul")


def test_equal_kernels_of_a_run_are_counted_together() -> None:
    """An addition behind a norm is no part of the run before the norm, even if it is as large."""
    kernels = (PRODUCT, PRODUCT, ADD, MUL, ADD, NORM, ADD, PRODUCT)
    found = [(k.kind, k.op, k.count) for k in counted(Cost(kernels)).kernels]
    assert found == [
        ("matmul", "add", 2),
        ("elementwise", "add", 2),
        ("elementwise", "mul", 1),
        ("norm", "add", 1),
        ("elementwise", "add", 1),
        ("matmul", "add", 1),
    ]
