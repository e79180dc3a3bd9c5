"""A software stack runs other kernels than a plan counts: more bytes, fewer, or none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piper_ir.program.program import Kernel
from piper_simulator import STACKS
from piper_simulator.durations.software_kernels import run_kernels

COPY = Kernel("elementwise", (), "bfloat16", 0, 1000, op="clone")
ADD = replace(COPY, op="add")


@pytest.mark.parametrize(("factor", "sizes"), [(0.25, [250, 1000]), (0, [1000])])
def test_an_operator_moves_as_much_as_the_stack_says(factor: float, sizes: list[int]) -> None:
    stack = replace(STACKS["eager"], passes={"clone": factor})
    assert [k.bytes for k in run_kernels(stack, [COPY, ADD], "F")] == sizes
    assert [k.bytes for k in run_kernels(STACKS["eager"], [COPY, ADD], "F")] == [1000, 1000]


def test_a_factor_of_one_step_leaves_the_others() -> None:
    stack = replace(STACKS["eager"], passes={"I.clone": 0})
    assert [len(run_kernels(stack, [COPY, ADD], step)) for step in ("F", "I")] == [2, 1]
