"""Say how ops on quantised matrices loop. A block of a matrix has one scale, so a shard has whole blocks.

Blocks with all elements of a dimension can be sharded along it by a rewrite (`layouts.rewrites`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import piper_ops  # noqa: F401 - registers the ops
from piper_capture.layouts.loops import DimOf, Inner, Loops, Nest, OpCall
from piper_capture.layouts.rules.letters import OUT
from piper_capture.torch_api._torch import OpOverload

piper = torch.ops.piper


def _scale(call: OpCall) -> Loops:
    """Return the loops of the scales of a matrix."""
    same, whole = _blocks(call, 0, OUT)
    return Loops(tuple(same), whole=frozenset({*whole, *_spread(call, 0, OUT)}))


def _cast(call: OpCall) -> Loops:
    """Return the loops of a conversion, which reads the scale of each element."""
    x, scale = call.number("x"), call.number("scale")
    same, whole = _blocks(call, x, scale)
    alike = [((a,), (b,)) for a, b in zip(call.dims(x), call.dims(OUT), strict=True)]
    return Loops((*same, *alike), whole=frozenset(whole))


def _product(call: OpCall) -> Loops:
    """Return the loops of a product of two matrices and their scales."""
    a, b = call.number("a"), call.number("b")
    (m, k), (summed, n), (rows, columns) = call.dims(a), call.dims(b), call.dims(OUT)
    same: list[tuple[Nest, Nest]] = [((m,), (rows,)), ((n,), (columns,)), ((summed,), (k,))]
    whole: set[DimOf | Inner] = set()
    for matrix, name in ((a, "scale_a"), (b, "scale_b")):
        pairs, blocked = _blocks(call, matrix, call.number(name))
        same += pairs
        whole |= blocked
    return Loops(tuple(same), frozenset({summed}), frozenset(whole))


def _blocks(
    call: OpCall, matrix: int, scale: int
) -> tuple[list[tuple[Nest, Nest]], set[DimOf | Inner]]:
    """Return the loops over blocks that a matrix and its scales share, and the ones that cannot be sharded."""
    same: list[tuple[Nest, Nest]] = []
    whole: set[DimOf | Inner] = set()
    for number, (of_matrix, of_scale) in enumerate(
        zip(call.dims(matrix), call.dims(scale), strict=True)
    ):
        size, blocks = call.size(of_matrix), call.size(of_scale)
        if blocks == 1 and size > 1:
            whole.add(of_scale)
        elif blocks == size:
            same.append(((of_matrix,), (of_scale,)))
        else:
            inner = Inner(size // blocks, 2 * (matrix + 2) + number)
            same.append(((of_matrix,), (of_scale, inner)))
            whole.add(inner)
    return same, whole


def _spread(call: OpCall, matrix: int, scale: int) -> Iterator[DimOf | Inner]:
    """Yield the dimensions of a matrix that lie in one block."""
    pairs = zip(call.dims(matrix), call.dims(scale), strict=True)
    return (a for a, b in pairs if call.size(b) == 1 and call.size(a) > 1)


RULES: dict[OpOverload, Callable[[OpCall], Loops]] = {
    piper.float8_scale.default: _scale,
    piper.float8_cast.default: _cast,
    piper.float8_mm.default: _product,
}
