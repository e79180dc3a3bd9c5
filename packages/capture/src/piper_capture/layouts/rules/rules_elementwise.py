"""Say how element-wise ops loop: over each dimension of their result, along which their arguments may be broadcast."""

from __future__ import annotations

from collections.abc import Callable

import torch

from piper_capture.layouts.loops import Loops, Nest, OpCall
from piper_capture.torch_api._torch import OpOverload

aten = torch.ops.aten

UNTAGGED: frozenset[OpOverload] = frozenset(
    {
        aten._to_copy.default, aten.copy.default, aten.detach.default, aten.alias.default, aten.lift_fresh.default,
        aten.lift_fresh_copy.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        aten.empty_like.default, aten.fill.Scalar, aten.fill.Tensor, aten.floor_divide.default, aten.masked_fill.Tensor,
        aten.hardswish.default, aten.hardswish_backward.default, aten.hardsigmoid_backward.default,
        aten.hardtanh_backward.default, aten.leaky_relu_backward.default, aten.elu_backward.default,
        aten.softplus_backward.default, aten.mish_backward.default, aten.softshrink_backward.default,
        aten.hardshrink_backward.default, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar,
    }
)  # fmt: skip
"""The element-wise ops that torch does not tag as such in all of its releases."""
DRAWING: frozenset[OpOverload] = frozenset({aten.native_dropout.default})
"""The element-wise ops that draw random numbers: each device draws the numbers of its own elements."""
ALONE: frozenset[OpOverload] = frozenset(
    {
        aten.neg.default, aten.clone.default, aten.mul.Scalar, aten.div.Scalar, aten.alias.default, aten.detach.default,
        aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.positive.default, aten._to_copy.default,
        aten.zeros_like.default,
    }
)  # fmt: skip
"""The ops of one tensor that are linear in it."""
FIRST: frozenset[OpOverload] = frozenset(
    {
        aten.div.Tensor, aten.native_dropout_backward.default, aten.gelu_backward.default, aten.silu_backward.default,
        aten.tanh_backward.default, aten.sigmoid_backward.default, aten.threshold_backward.default,
        aten.logit_backward.default, aten.hardswish_backward.default, aten.hardsigmoid_backward.default,
        aten.hardtanh_backward.default, aten.leaky_relu_backward.default, aten.elu_backward.default,
        aten.softplus_backward.default, aten.mish_backward.default, aten.softshrink_backward.default,
        aten.hardshrink_backward.default,
    }
)  # fmt: skip
"""The ops that are linear in their first tensor: divisions by the others, and gradients."""
TOGETHER: frozenset[OpOverload] = frozenset({aten.add.Tensor, aten.sub.Tensor})
"""The ops that are linear in all of their tensors together."""
TERMS = ("self", "other", "value")
"""The values that a condition or a mask chooses from; a scalar other than 0 is no partial sum."""


def elementwise(call: OpCall) -> Loops:
    """Return the loops of an element-wise op."""
    same = [
        pair
        for k in range(len(call.tensors))
        for r in range(len(call.results))
        for pair in broadcast(call, k, -1 - r)
    ]
    return Loops(tuple(same), linear=_linear(call))


def broadcast(call: OpCall, argument: int, result: int) -> list[tuple[Nest, Nest]]:
    """Return the dimensions that an argument and a result share when they are aligned from the right."""
    pairs = zip(call.dims(argument)[::-1], call.dims(result)[::-1], strict=False)
    return [((a,), (b,)) for a, b in pairs if call.size(a) == call.size(b)]


def _linear(call: OpCall) -> tuple[frozenset[int], ...]:
    numbers = range(len(call.tensors))
    if call.op in TOGETHER:
        return (
            (frozenset(numbers),) if len(numbers) == 2 else ()
        )  # a number added to each term would be added n times
    if call.op in ALONE or call.op in FIRST:
        return (frozenset({0}),)
    rule = _OTHERS.get(call.op)
    return rule(call) if rule is not None else ()


def _product(call: OpCall) -> tuple[frozenset[int], ...]:
    """Return that a product is linear in each of its tensors while the other is replicated."""
    return tuple(frozenset({k}) for k in range(len(call.tensors)))


def _choice(call: OpCall) -> tuple[frozenset[int], ...]:
    """Return that a choice is linear in the values that it chooses from, together."""
    numbers = frozenset(k for name in TERMS if name in call.args for k in call.numbers(name))
    others = [call.args[n] for n in TERMS if n in call.args and not call.numbers(n)]
    return (numbers,) if all(other == 0 for other in others) else ()


def _added_product(call: OpCall) -> tuple[frozenset[int], ...]:
    return frozenset({0, 1}), frozenset({0, 2})


_OTHERS: dict[OpOverload, Callable[[OpCall], tuple[frozenset[int], ...]]] = {
    aten.mul.Tensor: _product,
    aten.where.self: _choice,
    aten.where.ScalarOther: _choice,
    aten.where.ScalarSelf: _choice,
    aten.masked_fill.Scalar: _choice,
    aten.masked_fill.Tensor: _choice,
    aten.copy.default: lambda call: (frozenset({1}),),
    aten.addcmul.default: _added_product,
    aten.addcdiv.default: lambda call: (frozenset({0, 1}),),
    aten.lerp.Scalar: lambda call: (frozenset({0, 1}),),
    aten.lerp.Tensor: lambda call: (frozenset({0, 1}),),
}
