"""Say how ops loop that look up, compare classes, or make tensors out of nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import piper_ops  # noqa: F401  (registers the ops)
from piper_compiler.capture._torch import OpOverload
from piper_compiler.capture.layouts.loops import At, Loops, OpCall, Shape

aten = torch.ops.aten
piper = torch.ops.piper
OUT = -1


def _embedding(call: OpCall) -> Loops:
    weight, indices = call.number("weight"), call.number("indices")
    rank = len(call.shape(indices))
    same = [((At(indices, d),), (At(OUT, d),)) for d in range(rank)]
    return Loops((*same, ((At(weight, 1),), (At(OUT, rank),))), whole=frozenset({At(weight, 0)}), linear=(frozenset({weight}),))


def _embedding_gradient(call: OpCall) -> Loops:
    grad, indices = call.number("grad_output"), call.number("indices")
    rank = len(call.shape(indices))
    same = [((At(indices, d),), (At(grad, d),)) for d in range(rank)]
    summed = frozenset(At(indices, d) for d in range(rank))
    return Loops((*same, ((At(grad, rank),), (At(OUT, 1),))), summed, frozenset({At(OUT, 0)}), linear=(frozenset({grad}),))


def _made(call: OpCall) -> Loops:
    """Return the loops of an op that fills a tensor with one number: each element by itself."""

    def localize(call: OpCall, results: Sequence[Shape]) -> Mapping[str, Any]:
        return {"size": list(results[0])}

    return Loops(localize=localize)


RULES: dict[OpOverload, Callable[[OpCall], Loops]] = {
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_gradient,
    aten.zeros.default: _made,
    aten.ones.default: _made,
    aten.full.default: _made,
}
