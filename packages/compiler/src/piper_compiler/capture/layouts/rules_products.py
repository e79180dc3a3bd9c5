"""Say how matrix products loop: over rows, columns and what they sum over."""

from __future__ import annotations

from collections.abc import Callable

import torch

from piper_compiler.capture._torch import OpOverload
from piper_compiler.capture.layouts.loops import At, Loops, Nest, OpCall
from piper_compiler.capture.layouts.rules_elementwise import broadcast

aten = torch.ops.aten
OUT = -1


def _product(a: int, b: int, batch: int) -> tuple[tuple[tuple[Nest, Nest], ...], frozenset[At]]:
    """Return the equal loops of [batch..., m, k] x [batch..., k, n], and what is summed over."""
    m, k, n = batch, batch + 1, batch + 1
    same: list[tuple[Nest, Nest]] = [((At(x, d),), (At(OUT, d),)) for d in range(batch) for x in (a, b)]
    same += [((At(a, m),), (At(OUT, m),)), ((At(a, k),), (At(b, batch),)), ((At(b, n),), (At(OUT, n),))]
    return tuple(same), frozenset({At(a, k), At(b, batch)})


def _mm(call: OpCall) -> Loops:
    same, summed = _product(0, 1, 0)
    return Loops(same, summed, linear=(frozenset({0}), frozenset({1})))


def _bmm(call: OpCall) -> Loops:
    same, summed = _product(0, 1, 1)
    return Loops(same, summed, linear=(frozenset({0}), frozenset({1})))


def _addmm(batch: int, call: OpCall) -> Loops:
    """Return the loops of a product with something added, which each term of a sum would add again."""
    same, _ = _product(1, 2, batch)
    inner = frozenset({At(1, batch + 1), At(2, batch)})
    return Loops((*same, *broadcast(call, 0, OUT)), whole=inner)


RULES: dict[OpOverload, Callable[[OpCall], Loops]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.addmm.default: lambda call: _addmm(0, call),
    aten.baddbmm.default: lambda call: _addmm(1, call),
}
