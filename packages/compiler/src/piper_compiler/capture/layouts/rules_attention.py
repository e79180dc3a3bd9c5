"""Say how fused attention loops: over rows, heads of keys, groups of queries and elements of heads.

The tokens of queries and keys are whole: a softmax runs over the keys, and which keys a query sees depends on its place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import piper_ops  # noqa: F401  (registers the ops)
from piper_compiler.capture._torch import OpOverload
from piper_compiler.capture.layouts.loops import At, Inner, Loops, Nest, OpCall

piper = torch.ops.piper
ROWS, TOKENS, HEADS, ELEMENTS = range(4)


def _attention(call: OpCall) -> Loops:
    q, k, v, out, lse = call.number("q"), call.number("k"), call.number("v"), -1, -2
    return _loops(call, queries=(q, out), keys=(k, v), statistics=(lse,), summed=frozenset())


def _dgrad(call: OpCall) -> Loops:
    q, k, v = (call.number(name) for name in ("q", "k", "v"))
    queries = (call.number("grad_out"), q, call.number("out"), -1)
    groups = Inner(call.shape(q)[HEADS] // call.shape(k)[HEADS])
    return _loops(call, queries, (k, v, -2, -3), (call.number("logsumexp"),), frozenset({groups}))


def _loops(
    call: OpCall, queries: tuple[int, ...], keys: tuple[int, ...], statistics: tuple[int, ...], summed: frozenset[At | Inner]
) -> Loops:
    groups = Inner(call.shape(queries[0])[HEADS] // call.shape(keys[0])[HEADS])
    first, rows = queries[0], At(queries[0], ROWS)
    same: list[tuple[Nest, Nest]] = [((rows,), (At(k, ROWS),)) for k in (*queries[1:], *keys, *statistics)]
    same += [((At(first, HEADS),), (At(k, HEADS),)) for k in queries[1:]]
    same += [((At(first, HEADS),), (At(k, 1),)) for k in statistics]
    same += [((At(first, HEADS),), (At(k, HEADS), groups)) for k in keys]
    same += [((At(queries[0], TOKENS),), (At(k, TOKENS),)) for k in queries[1:]]
    same += [((At(queries[0], TOKENS),), (At(k, 2),)) for k in statistics]
    same += [((At(keys[0], TOKENS),), (At(k, TOKENS),)) for k in keys[1:]]
    whole: set[At | Inner] = {At(k, d) for k in (*queries, *keys) for d in (TOKENS, ELEMENTS)}
    for k in call.numbers("mask"):  # [..., heads, queries, keys], where 1 stands for all heads or rows
        whole |= set(call.dims(k))
    return Loops(tuple(same), summed, frozenset(whole))


RULES: dict[OpOverload, Callable[[OpCall], Loops]] = {
    piper.attention.default: _attention,
    piper.attention_dgrad.default: _dgrad,
}
