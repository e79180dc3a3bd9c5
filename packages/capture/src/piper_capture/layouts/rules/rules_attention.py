"""Say how fused attention loops: over rows, heads of keys and groups of queries, not causal also over queries.

The tokens of keys cannot be sharded, since a softmax runs over them. Nor can the tokens of causal queries: the keys
that a query sees depend on its position.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import piper_ops  # noqa: F401 - registers the ops
from piper_capture.layouts.loops import DimOf, Inner, Loops, Nest, OpCall
from piper_capture.layouts.rules.letters import each
from piper_capture.torch_api._torch import OpOverload

piper = torch.ops.piper
ROWS, TOKENS, HEADS, ELEMENTS = range(4)


def _attention(call: OpCall) -> Loops:
    return _loops(
        call,
        queries=(call.number("q"), -1),
        keys=(call.number("k"), call.number("v")),
        statistics=-2,
    )


def _dgrad(call: OpCall) -> Loops:
    """Return the loops of the gradients. The gradients of keys and values are sums over queries."""
    grad, q, k, v, out = (call.number(name) for name in ("grad_out", "q", "k", "v", "out"))
    return _loops(
        call,
        (q, grad, out, -1),
        (k, v, -2, -3),
        call.number("logsumexp"),
        summed=True,
        linear=each(grad),
    )


def _loops(
    call: OpCall,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    statistics: int,
    summed: bool = False,
    linear: tuple[frozenset[int], ...] = (),
) -> Loops:
    first, key = queries[0], keys[0]
    groups: DimOf | Inner = Inner(call.shape(first)[HEADS] // call.shape(key)[HEADS])
    places = {ROWS: DimOf(first, ROWS), HEADS: DimOf(first, HEADS), TOKENS: DimOf(first, TOKENS)}
    same: list[tuple[Nest, Nest]] = [
        ((at,), (DimOf(k, d),)) for d, at in places.items() for k in queries[1:]
    ]
    same += [((places[d],), (DimOf(statistics, k),)) for k, d in enumerate((ROWS, HEADS, TOKENS))]
    same += [((places[ROWS],), (DimOf(k, ROWS),)) for k in keys]
    same += [((places[HEADS],), (DimOf(k, HEADS), groups)) for k in keys]
    same += [((DimOf(key, TOKENS),), (DimOf(k, TOKENS),)) for k in keys[1:]]
    whole: set[DimOf | Inner] = {
        DimOf(key, TOKENS),
        *(DimOf(k, ELEMENTS) for k in (*queries, *keys)),
    }
    if call.get("is_causal"):
        whole.add(places[TOKENS])
    for k in call.numbers(
        "mask"
    ):  # the end of [rows, heads, queries, keys], each of which may be 1 for all
        full = (places[ROWS], places[HEADS], places[TOKENS], DimOf(key, TOKENS))
        pairs = zip(call.dims(k)[::-1], full[::-1], strict=False)
        same += [((at,), (other,)) for at, other in pairs if call.size(at) == call.size(other)]
    return Loops(
        tuple(same),
        frozenset({groups, places[TOKENS]}) if summed else frozenset(),
        frozenset(whole),
        linear,
    )


RULES: dict[OpOverload, Callable[[OpCall], Loops]] = {
    piper.attention.default: _attention,
    piper.attention_dgrad.default: _dgrad,
}
