"""Give collectives inside of steps the memory of their results, and start them for engines that cannot."""

from __future__ import annotations

from collections.abc import Callable

import torch

from piper_ir.ground.errors import ExecutionError
from piper_ir.program.collectives import law_of

Exchange = Callable[..., torch.Tensor]
"""A function that runs a collective of a kind with the devices along an axis, from a tensor to the result.

It may be given the tensor that takes the result as a fourth argument.
"""
Post = Callable[[str, str, int, torch.Tensor], Callable[[], torch.Tensor]]
"""A function that starts a collective of a kind among the devices along an axis, whose number it is given.

It returns a function that waits for the result.
"""
SPOILED = 113
"""The number that fills memory whose content is undefined, so that a step that reads it fails visibly."""


def no_exchange(
    kind: str, axis: str, given: torch.Tensor, into: torch.Tensor | None = None
) -> torch.Tensor:
    """Raise ExecutionError: only steps with collectives in the plan can exchange tensors."""
    raise ExecutionError(f"a step asks for {kind} along {axis}, and no engine runs it")


def result_of(kind: str, degree: int, given: torch.Tensor) -> torch.Tensor:
    """Return memory for the result of a collective among `degree` devices; it is the operand's own for an all-reduce.

    Operands are as `piper_ops.pointwise.collectives` describes them.
    """
    law = law_of(kind)
    if law.in_place:
        return given
    if law.writes == "part":
        return torch.empty(given.shape[1:], dtype=given.dtype, device=given.device)
    lead = () if law.reads == "whole" else (degree,)
    return torch.empty((*lead, *given.shape), dtype=given.dtype, device=given.device)


def post_late(exchange: Exchange) -> Post:
    """Return a function that only makes the memory of the result, and runs the collective where a step waits for it.

    No step may notice: a step that reads the result too early gets wrong numbers, as with a real network.
    """

    def post(kind: str, axis: str, degree: int, given: torch.Tensor) -> Callable[[], torch.Tensor]:
        given = given.contiguous()
        result = result_of(kind, degree, given)
        if result is not given:
            result.fill_(SPOILED)
        return lambda: exchange(kind, axis, given, result)

    return post
