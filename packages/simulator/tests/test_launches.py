"""Protect the launches of a step: one for each call of a module, and less for the kernels and messages within it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from piper_ir.program.layout import StepCollective
from piper_ir.program.program import Cost, Kernel, OverlappedCollective, Signature
from piper_simulator import load_cluster
from piper_simulator.durations.kernels import PART_S, launch_count
from piper_simulator.durations.launches import spared_launches
from piper_simulator.durations.software_kernels import run_kernels

MODULES = load_cluster("h100x8@hopper-megatron").device
KERNELS = load_cluster("h100x8@hopper-piper").device
LESS = PART_S / MODULES.launch_s
PRODUCT = Kernel("matmul", (4096, 4096, 1024), "bfloat16", 2 * 4096**2 * 1024, 0, op="mm")


def passing(*ops: str, dtype: str = "float32") -> list[Kernel]:
    return [Kernel("elementwise", (), dtype, 0, 2**20, op=op) for op in ops]


def attention(tokens: int, count: int = 1) -> Kernel:
    dims = (1, 8, tokens, tokens, 128)
    return Kernel("attention", dims, "bfloat16", 2**40, 2**20, count, op="attention")


RING = [attention(8192), attention(4096, 7), *passing("context_take", "context_merge")]
FLOAT8 = [*passing("float8_scale", "amin", "float8_cast"), replace(PRODUCT, dtype="float8")]


@pytest.mark.parametrize(("kernels", "parts"), [(RING, 9), (FLOAT8, 3), ([PRODUCT], 0)])
def test_kernels_within_a_call_cost_the_host_less(kernels: Sequence[Kernel], parts: int) -> None:
    """Ring attention and casts to float8 are started by the call of a module of Transformer Engine."""
    assert launch_count(MODULES, Cost(tuple(kernels))) == pytest.approx(1 + parts * LESS)
    assert launch_count(KERNELS, Cost(tuple(kernels))) == 1 + parts


def test_casts_to_float8_do_not_keep_gate_and_up_apart() -> None:
    stack = MODULES.stack
    assert stack is not None
    (mul, silu) = passing("mul", "silu", dtype="bfloat16")
    joined = [
        k for k in run_kernels(stack, [*FLOAT8, silu, *FLOAT8, mul], "F") if k.kind == "matmul"
    ]
    assert [k.dims for k in joined] == [(4096, 8192, 1024)]


def message(kind: str, why: str) -> StepCollective:
    return StepCollective("shift" if kind == "shift" else "all_gather", "tp", 2**20, why)


def test_pieces_of_a_message_are_sent_by_one_call() -> None:
    """Products beside the pieces are pieces, too; two messages of one reason that hide nothing are two calls."""
    beside = tuple(OverlappedCollective(n, Cost((PRODUCT,))) for n in (1, 2, 3))
    pieces = (message("all_gather", "before mm (a.py:1)"),) * 4
    ring = (message("shift", "in attention (a.py:2)"),) * 3
    scale = message("all_gather", "in float8_scale (a.py:3)")
    for step, spared in (
        (Signature((), (), collectives=pieces, overlaps=beside), 6),
        (Signature((), (), collectives=pieces), 0),
        (Signature((), (), collectives=ring), 2),
        (Signature((), (), collectives=(scale,)), 1),
    ):
        assert spared_launches(MODULES, step, "F") == pytest.approx(spared * (1 - LESS))
        assert spared_launches(KERNELS, step, "F") == 0
