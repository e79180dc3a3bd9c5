"""Say how products of matrices and convolutions loop: over rows, columns or channels, and the contracted dimension."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from piper_capture.layouts.loops import DimOf, Inner, Loops, Nest, OpCall, Shape
from piper_capture.layouts.rules.letters import OUT, all_whole, each, lettered, rank
from piper_capture.layouts.rules.rules_elementwise import broadcast
from piper_capture.torch_api._torch import OpOverload

aten = torch.ops.aten


def _product(left: str, right: str, result: str, call: OpCall) -> Loops:
    return lettered({0: left, 1: right, OUT: result}, summed="k", linear=each(0, 1))


def _added_product(left: str, right: str, result: str, call: OpCall) -> Loops:
    """Return the loops of a product with an addend, which each partial sum would add again."""
    loops = lettered(
        {1: left, 2: right, OUT: result}, whole="k", linear=(frozenset({0, 1}), frozenset({0, 2}))
    )
    return replace(loops, same=(*loops.same, *broadcast(call, 0, OUT)))


def _convolution(call: OpCall) -> Loops:
    bias = call.numbers("bias")
    groups = _Groups(call)
    if rank(call, 0) != rank(call, 1):
        return all_whole(call)
    same = [
        ((DimOf(0, 0),), (DimOf(OUT, 0),)),
        *groups.wide(0),
        *groups.weights(1),
        *groups.narrow(OUT),
    ]
    same += [pair for k in bias for pair in groups.narrow(k, dim=0)]
    ins = groups.ins if not bias else ()
    whole: set[DimOf | Inner] = {*groups.blocked, *(groups.ins if bias else ())}
    whole |= {DimOf(k, d) for k in (0, 1, OUT) for d in range(2, rank(call, k))}
    linear = (frozenset({0, *bias}), frozenset({1, *bias}))

    def localize(call: OpCall, results: Sequence[Shape]) -> Mapping[str, Any]:
        return {"groups": results[0][1] // groups.per_group_out} if groups.many else {}

    return Loops(tuple(same), frozenset(ins), frozenset(whole), linear, localize)


def _convolution_backward(call: OpCall) -> Loops:
    """Return the loops of the gradients of input, weight and bias, each of which may be left out."""
    grad, wide, weight = (call.number(n) for n in ("grad_output", "input", "weight"))
    wants_input, wants_weight, wants_bias = (call.made(k) for k in range(3))
    groups = _Groups(call)
    like_input = [wide, *([-1] if wants_input else [])]
    like_weight = [weight, *([-2] if wants_weight else [])]
    same: list[tuple[Nest, Nest]] = [((DimOf(grad, 0),), (DimOf(k, 0),)) for k in like_input]
    same += [pair for k in like_input for pair in groups.wide(k)] + list(groups.narrow(grad))
    same += [pair for k in like_weight for pair in groups.weights(k)]
    same += list(groups.narrow(-3, dim=0)) if wants_bias else []
    summed: set[DimOf | Inner] = {DimOf(grad, 0), *groups.outs}
    whole: set[DimOf | Inner] = {
        DimOf(k, d) for k in (*like_input, *like_weight, grad) for d in range(2, rank(call, k))
    }
    whole |= {*groups.blocked, *(groups.ins if wants_bias else ())}
    whole |= set() if wants_input or wants_weight else {groups.count}

    def localize(call: OpCall, results: Sequence[Shape]) -> Mapping[str, Any]:
        changes: dict[str, Any] = {"bias_sizes": list(results[2])} if wants_bias else {}
        if groups.many and (wants_input or wants_weight):
            changes["groups"] = (
                results[0][1] // groups.per_group_in
                if wants_input
                else results[1][0] // groups.first
            )
        return changes

    return Loops(tuple(same), frozenset(summed), frozenset(whole), each(grad), localize)


class _Groups:
    """Name the channels of a convolution.

    Without groups, input and output channels are loops of their own. With several, channels are [groups, channels of a
    group], and only the groups can be sharded.
    """

    def __init__(self, call: OpCall) -> None:
        count, self._transposed = int(call.get("groups")), bool(call.get("transposed"))
        first, second = call.shape(call.number("weight"))[:2]
        self.many = count > 1
        self.first = first // count
        """The steps of a weight's first dimension in one group."""
        self.per_group_in, self.per_group_out = (
            (self.first, second) if self._transposed else (second, self.first)
        )
        self.count, self._in, self._out = (
            Inner(count, 0),
            Inner(self.per_group_in, 1),
            Inner(self.per_group_out, 2),
        )
        self.ins: tuple[Inner, ...] = () if self.many else (self._in,)
        self.outs: tuple[Inner, ...] = () if self.many else (self._out,)
        self.blocked: tuple[Inner, ...] = (self._in, self._out) if self.many else ()

    def wide(self, tensor: int) -> tuple[tuple[Nest, Nest], ...]:
        """Return the input channels of a tensor [rows, channels, ...]."""
        return (((DimOf(tensor, 1),), (self.count, self._in)),)

    def narrow(self, tensor: int, dim: int = 1) -> tuple[tuple[Nest, Nest], ...]:
        """Return the output channels of a tensor."""
        return (((DimOf(tensor, dim),), (self.count, self._out)),)

    def weights(self, tensor: int) -> tuple[tuple[Nest, Nest], ...]:
        """Return the channels of a weight: [output, input of a group, ...], or [input, output of a group, ...]."""
        first, second = (self._in, self._out) if self._transposed else (self._out, self._in)
        return (((DimOf(tensor, 0),), (self.count, first)), ((DimOf(tensor, 1),), (second,)))


RULES: dict[OpOverload, Callable[[OpCall], Loops]] = {
    aten.mm.default: partial(_product, "mk", "kn", "mn"),
    aten.bmm.default: partial(_product, "bmk", "bkn", "bmn"),
    aten.mv.default: partial(_product, "mk", "k", "m"),
    aten.dot.default: partial(_product, "k", "k", ""),
    aten.addmm.default: partial(_added_product, "mk", "kn", "mn"),
    aten.baddbmm.default: partial(_added_product, "bmk", "bkn", "bmn"),
    aten.addmv.default: partial(_added_product, "mk", "k", "m"),
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
