"""Say how element-wise ops loop: over each dimension of their result, along which their arguments may be broadcast."""

from __future__ import annotations

import torch

from piper_compiler.capture._torch import OpOverload
from piper_compiler.capture.layouts.loops import At, Loops, Nest, OpCall

aten = torch.ops.aten

TOGETHER: frozenset[OpOverload] = frozenset({aten.add.Tensor, aten.sub.Tensor})
"""The ops that are linear in all of their tensors together."""
ALONE: frozenset[OpOverload] = frozenset(
    {aten.neg.default, aten.clone.default, aten.mul.Scalar, aten.div.Scalar, aten.alias.default, aten.detach.default}
)
"""The ops of one tensor that are linear in it."""
EACH: frozenset[OpOverload] = frozenset({aten.mul.Tensor})
"""The ops that are linear in each of their tensors while the other is equal on all devices."""
FIRST: frozenset[OpOverload] = frozenset({aten.div.Tensor})
"""The ops that are linear in their first tensor."""


def elementwise(call: OpCall) -> Loops:
    """Return the loops of an element-wise op."""
    same = [pair for k in range(len(call.tensors)) for r in range(len(call.results)) for pair in broadcast(call, k, -1 - r)]
    return Loops(tuple(same), linear=_linear(call))


def broadcast(call: OpCall, argument: int, result: int) -> list[tuple[Nest, Nest]]:
    """Return the dimensions that an argument and a result share when they are aligned from the right."""
    pairs = zip(call.dims(argument)[::-1], call.dims(result)[::-1], strict=False)
    return [((a,), (b,)) for a, b in pairs if call.size(a) == call.size(b)]


def _linear(call: OpCall) -> tuple[frozenset[int], ...]:
    numbers = range(len(call.tensors))
    if call.op in TOGETHER:
        return (frozenset(numbers),) if len(numbers) == 2 else ()  # a number added to each term would be added n times
    if call.op in ALONE:
        return (frozenset({0}),)
    if call.op in EACH:
        return tuple(frozenset({k}) for k in numbers)
    return (frozenset({0}),) if call.op in FIRST else ()


def alike(call: OpCall, *tensors: int) -> tuple[tuple[Nest, Nest], ...]:
    """Return the dimensions of tensors of equal shapes, as equal loops."""
    first, *others = tensors
    dims = range(len(call.shape(first)))
    return tuple(((At(first, d),), (At(other, d),)) for other in others for d in dims)
