"""Slow products down whose matrices have rows that begin at no multiple of 16 bytes, as of a vocabulary of 50,257."""

from __future__ import annotations

from piper_ir.ground.sizes import bind
from piper_ir.program.program import Kernel, Step
from piper_simulator.cluster.device import Device

ALIGNED = 8
"""The elements of 16 bit that are 16 bytes, which tensor cores load at once."""
UNALIGNED = {"ampere": 0.37, "hopper": 0.175, "blackwell": 0.175}
"""The part of its rate that a product of 16 bit reaches where rows do not begin at multiples of 16 bytes.

hopper: the head of nanotron's 1B model, alone on an H100 with 50,257 tokens (huggingface.co/nanotron/old_bench,
llama-1B/8_GPUS/dp-1_tp-1_pp-8_mbz-4); blackwell is taken to be like it, as both copy matrices with TMA. ampere: a
vocabulary of 50,304 in place of 50,257 gained 25 % of a step of nanoGPT's GPT-2 on A100 (February 2023).
"""
_HALF = frozenset({"bfloat16", "float16"})


def aligned_part(device: Device, kernel: Kernel, step: Step) -> float:
    """Return the fraction of its rate that a product of a step reaches: below 1 where rows are unaligned.

    A stack that pads matrices (`Stack.pads`) reaches all of it.
    """
    padded = device.stack is not None and device.stack.pads
    if padded or not unaligned_features(kernel, step):
        return 1.0
    return UNALIGNED.get(device.generation, 1.0)


def unaligned_features(kernel: Kernel, step: Step) -> tuple[int, ...]:
    """Return the numbers of features of a product of 16 bit (batch, M, N, K) that are no multiples of ALIGNED.

    Rows of its matrices are as long as features: N and K, but M and N for gradients of weights. The other dimension is
    of tokens, whose number does not matter.
    """
    if kernel.kind != "matmul" or kernel.dtype not in _HALF or not kernel.dims:
        return ()
    rows = tuple(bind(d, 0) for d in kernel.dims)[-3:]
    of_features = {"W": rows[:2], "B": rows}.get(step, rows[1:])
    return tuple([n for n in of_features if n % ALIGNED])
