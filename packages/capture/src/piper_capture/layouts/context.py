"""Compute attention with both queries and keys sharded along the tokens: by a ring, or with all-gathered keys.

Each device has the queries of its tokens. Step by step they attend to the keys of one device after the other, and the
results are merged by their logsumexps (Liu et al., Ring attention, arXiv 2310.01889). In a ring, keys and values go
from device to device; all-gathered ones are there. The backward runs each step's gradient by itself, with the final
result and logsumexp. The gradients of queries stay. The gradients of keys and values go around with these in a ring,
and are partial sums otherwise.
`piper_ops.attention.context` tells of the order "zigzag", in which all devices have equal work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from piper_capture.graphs.stepgraph import Joint
from piper_capture.layouts.emit import Emitter
from piper_capture.layouts.indexes import LoopIndex, OpIndexes
from piper_capture.layouts.loops import Emit, LoopPlace, LoopRewrite, OpCall
from piper_capture.layouts.reasons import title
from piper_capture.layouts.rewrites import OpArguments
from piper_capture.steps.kernels import COUNTS
from piper_capture.torch_api._torch import OpOverload
from piper_capture.values import aliasing
from piper_capture.values.coordinate import Coordinate
from piper_ir.ground.errors import DirectiveError
from piper_ir.program.layout import Sharding
from piper_ops import context_add, context_merge, context_take, shift

aten = torch.ops.aten
piper = torch.ops.piper
TOKENS, ELEMENTS = 1, 3
STATISTICS = 2
"""The dimension of a logsumexp that holds the tokens."""
ATTENTION = (piper.attention.default, piper.attention_dgrad.default)
_SOFTMAX = (aten._softmax.default, aten._safe_softmax.default)
HEADS, RING, GATHER = "heads", "ring", "gather"
ZIGZAG, BLOCKS = "zigzag", "blocks"


def ordered(one: Sharding, joints: Iterable[Joint]) -> Sharding:
    """Return the sharding with the order of tokens filled in: zigzag if any attention is causal.

    Raises DirectiveError if no attention of the model can be computed as asked for.
    """
    if one.attention == HEADS:
        return replace(one, order=one.order or BLOCKS)
    nodes = [n for joint in joints for n in joint.graph.nodes]
    ops = [n for n in nodes if n.target is piper.attention.default]
    if not ops:
        written = next(map(title, filter(_has_scores, nodes)), None)
        cause = (
            "the model has no attention that could be computed so; write it as F.scaled_dot_product_attention"
            if written is None
            else f"{written} has the scores of all tokens, as attention with dropout or with its weights returned has; "
            "write it as F.scaled_dot_product_attention without dropout_p, or as nn.MultiheadAttention with "
            "dropout=0 and need_weights=False"
        )
        raise DirectiveError(f'attention={one.attention!r}: {cause}, or use attention="heads"')
    masked = next(
        (n for n in ops if _named(n).get("mask") is not None or _named(n).get("window")), None
    )
    if one.attention == RING and masked is not None:
        kind = "a mask" if _named(masked).get("mask") is not None else "a window"
        raise DirectiveError(
            f'attention="ring": {title(masked)} has {kind}, of which each device would need other '
            f"columns in each step; "
            'use attention="gather" or "heads"'
        )
    causal = any(_named(n).get("is_causal") for n in ops)
    return replace(one, order=one.order or (ZIGZAG if causal else BLOCKS))


def _has_scores(node: fx.Node) -> bool:
    """Return whether a node is a softmax of more than a matrix, as of scores [rows, heads, tokens, tokens]."""
    return node.target in _SOFTMAX and bool(node.meta["val"].shape[2:])


def _named(node: fx.Node) -> dict[str, Any]:
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]  # an op
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def rewrite_of(op: OpIndexes, first: tuple[LoopIndex, ...], attention: str) -> LoopRewrite | None:
    """Return the ops that compute attention with queries and keys sharded along tokens, or None.

    The `first` indexes, along which they are sharded, must be outermost in the dimension of tokens: a row of the batch
    outside of them, in a sequence of all rows, is not supported.
    """
    known = _WAYS.get((op.call.op, attention))
    if known is None or {op.tensors[op.call.number(name)][TOKENS] for name in "qkv"} != {
        tokens_of(op)
    }:
        return None
    if tokens_of(op)[: len(first)] != first:
        return None
    if attention == RING:
        return LoopRewrite(known, partial=False)
    sums = frozenset({1, 2}) if op.call.op is piper.attention_dgrad.default else frozenset[int]()
    return LoopRewrite(known, partial=False, whole=frozenset(_whole(op.call)), partial_results=sums)


def tokens_of(op: OpIndexes) -> tuple[LoopIndex, ...]:
    """Return the indexes of the tokens of queries."""
    return op.tensors[op.call.number("q")][TOKENS]


def _whole(call: OpCall) -> Iterable[int]:
    """Yield keys, values and a mask that is the same for all queries."""
    yield from (call.number(name) for name in "kv")
    yield from (k for k in call.numbers("mask") if call.shape(k)[-2] == 1)


@dataclass(frozen=True)
class _Steps:
    """Hold the arguments and emit the nodes that all steps of an attention have in common.

    Attributes:
        given: the arguments of the attention.
        spread: the number of devices whose keys each device has at once: 1 in a ring, all of them where they are
            gathered.
    """

    emit: Emitter
    given: OpArguments
    place: LoopPlace
    spread: int

    @property
    def order(self) -> str:
        """Return the order of tokens, as the ops take it; it has no effect with gathered keys."""
        return self.place.order if self.given.get("is_causal") else ""

    @property
    def places(self) -> tuple[Any, ...]:
        return (Coordinate(self.place.axis),)

    def queries(self, x: fx.Node, step: int, dim: int = TOKENS) -> fx.Node:
        """Return the tokens of queries, or of a tensor laid out as they are, that take part in a step."""
        return self._taken(x, step, dim, keys=False, degree=1)

    def keys(self, x: fx.Node, step: int) -> fx.Node:
        """Return the tokens of keys that take part in a step."""
        return self._taken(x, step, TOKENS, keys=True, degree=self.spread)

    def _taken(self, x: fx.Node, step: int, dim: int, *, keys: bool, degree: int) -> fx.Node:
        if degree == 1 and (self.order != ZIGZAG or step == 0):
            return x
        return self.emit.call(context_take, x, dim, *self.places, step, self.order, keys, degree)

    def added(self, total: fx.Node, more: fx.Node, step: int, *, keys: bool) -> fx.Node:
        degree = self.spread if keys else 1
        return self.emit.call(
            context_add, total, more, TOKENS, *self.places, step, self.order, keys, degree
        )

    def attention(self, q: fx.Node, k: fx.Node, v: fx.Node, step: int) -> tuple[fx.Node, fx.Node]:
        """Add the attention of a step; only that of the own tokens is causal."""
        causal = bool(self.given.get("is_causal")) and step == 0
        options = self.given.get("scale"), bool(self.given.get("enable_gqa"))
        both = self.emit.call(piper.attention.default, q, k, v, None, causal, *options)
        both.meta[COUNTS] = 2 if step and self.order == ZIGZAG else 1
        return self.emit.item(both, 0), self.emit.item(both, 1)

    def gradients(self, k: fx.Node, v: fx.Node, step: int) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Add the gradients of a step, with the final result and logsumexp."""
        grad, q, out = (self.queries(self.given[name], step) for name in ("grad_out", "q", "out"))
        logsumexp = self.queries(self.given["logsumexp"], step, STATISTICS)
        causal = bool(self.given.get("is_causal")) and step == 0
        options = None, causal, self.given.get("scale")
        grads = self.emit.call(
            piper.attention_dgrad.default, grad, q, k, v, out, logsumexp, *options
        )
        return self.emit.item(grads, 0), self.emit.item(grads, 1), self.emit.item(grads, 2)

    def merged(
        self, before: tuple[fx.Node, fx.Node], more: tuple[fx.Node, fx.Node], step: int
    ) -> tuple[fx.Node, fx.Node]:
        last = step == self.place.degree - 1
        both = self.emit.call(context_merge, *before, *more, *self.places, step, self.order, last)
        return self.emit.item(both, 0), self.emit.item(both, 1)

    def moved(self, x: fx.Node) -> fx.Node:
        """Send a tensor to the next device."""
        return self.emit.call(shift, x, self.place.axis, self.place.degree)

    def wide(self, x: fx.Node) -> fx.Node:
        """Return a gradient in the dtype of its accumulation, the logsumexp's."""
        dtype = aliasing.tensor(self.given["logsumexp"]).dtype
        return (
            x
            if aliasing.tensor(x).dtype == dtype
            else self.emit.call(aten._to_copy.default, x, dtype=dtype)
        )

    def like(self, x: fx.Node, name: str) -> fx.Node:
        """Return a gradient dense, and in the dtype of its argument."""
        dtype = aliasing.tensor(self.given[name]).dtype
        if aliasing.tensor(x).dtype != dtype:
            return self.emit.call(
                aten._to_copy.default, x, dtype=dtype, memory_format=torch.contiguous_format
            )
        if aliasing.tensor(x).is_contiguous():
            return x
        return self.emit.call(aten.clone.default, x, memory_format=torch.contiguous_format)

    def joined(self, k: fx.Node, v: fx.Node) -> fx.Node:
        """Return keys and values, or their gradients, as one message."""
        return self.emit.call(aten.cat.default, [k, v], ELEMENTS)

    def apart(self, both: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return keys and values of a message, as views."""
        end = aliasing.tensor(both).shape[ELEMENTS]
        first = aliasing.tensor(self.given["k"]).shape[ELEMENTS]
        k, v = (
            self.emit.call(aten.slice.Tensor, both, ELEMENTS, *cut)
            for cut in ((0, first), (first, end))
        )
        return k, v


def _ring(emit: Emitter, named: OpArguments, places: Sequence[LoopPlace]) -> list[fx.Node]:
    """Send keys and values around, and merge the result of each step."""
    steps = _Steps(emit, named, _only(places), 1)
    attended = steps.attention(named["q"], named["k"], named["v"], 0)
    both = steps.joined(named["k"], named["v"])
    for step in range(1, steps.place.degree):
        both = steps.moved(both)
        k, v = (steps.keys(x, step) for x in steps.apart(both))
        attended = steps.merged(
            attended, steps.attention(steps.queries(named["q"], step), k, v, step), step
        )
    return list(attended)


def _ring_gradient(emit: Emitter, named: OpArguments, places: Sequence[LoopPlace]) -> list[fx.Node]:
    """Send keys and values around once more, with their gradients, which one step further are at home."""
    steps = _Steps(emit, named, _only(places), 1)
    total, *own = steps.gradients(named["k"], named["v"], 0)
    total, grads = steps.wide(total), steps.wide(steps.joined(*own))
    both = steps.joined(named["k"], named["v"])
    for step in range(1, steps.place.degree):
        both, grads = steps.moved(both), steps.moved(grads)
        k, v = (steps.keys(x, step) for x in steps.apart(both))
        of_queries, *of_keys = steps.gradients(k, v, step)
        total = steps.added(total, of_queries, step, keys=False)
        grads = steps.added(grads, steps.joined(*of_keys), step, keys=True)
    k, v = steps.apart(steps.moved(grads))
    return [steps.like(total, "q"), steps.like(k, "k"), steps.like(v, "v")]


def _gather(emit: Emitter, named: OpArguments, places: Sequence[LoopPlace]) -> list[fx.Node]:
    """Attend to the all-gathered keys, which are in the order of the sequence."""
    if not named.get("is_causal") or named.get("window"):
        mask, gqa = named.get("mask"), bool(named.get("enable_gqa"))
        options = mask, bool(named.get("is_causal")), named.get("scale"), gqa
        both = emit.call(
            piper.attention.default, *(named[n] for n in "qkv"), *options, *_window(named, places)
        )
        return [emit.item(both, 0), emit.item(both, 1)]
    steps = _Steps(emit, named, _only(places), _only(places).degree)
    attended = steps.attention(named["q"], steps.keys(named["k"], 0), steps.keys(named["v"], 0), 0)
    for step in range(1, steps.place.degree):
        k, v = (steps.keys(named[name], step) for name in "kv")
        attended = steps.merged(
            attended, steps.attention(steps.queries(named["q"], step), k, v, step), step
        )
    return list(attended)


def _gather_gradient(
    emit: Emitter, named: OpArguments, places: Sequence[LoopPlace]
) -> list[fx.Node]:
    """Return the gradients of the own queries, and partial sums of the gradients of all keys and values."""
    names = ("grad_out", "q", "k", "v", "out", "logsumexp")
    if not named.get("is_causal") or named.get("window"):
        options = named.get("mask"), bool(named.get("is_causal")), named.get("scale")
        dgrads = emit.call(
            piper.attention_dgrad.default,
            *(named[name] for name in names),
            *options,
            *_window(named, places),
        )
        return [emit.item(dgrads, k) for k in range(3)]
    steps = _Steps(emit, named, _only(places), _only(places).degree)
    total: fx.Node | None = None
    grads = [_zeros(steps, named[name]) for name in "kv"]
    for step in range(steps.place.degree):
        k, v = (steps.keys(named[name], step) for name in "kv")
        of_queries, *of_keys = steps.gradients(k, v, step)
        total = (
            steps.wide(of_queries)
            if total is None
            else steps.added(total, of_queries, step, keys=False)
        )
        grads = [
            steps.added(grad, more, step, keys=True)
            for grad, more in zip(grads, of_keys, strict=True)
        ]
    assert total is not None
    return [
        steps.like(total, "q"),
        *(steps.like(grad, name) for grad, name in zip(grads, "kv", strict=True)),
    ]


def _window(named: OpArguments, places: Sequence[LoopPlace]) -> tuple[Any, ...]:
    """Return the window of queries, if any, with the device's place among its sharers."""
    if not named.get("window"):
        return ()
    place = _only(places)
    return named["window"], Coordinate(place.axis), place.degree, place.order


def _zeros(steps: _Steps, like: fx.Node) -> fx.Node:
    value, dtype = aliasing.tensor(like), aliasing.tensor(steps.given["logsumexp"]).dtype
    return steps.emit.call(aten.zeros.default, list(value.shape), dtype=dtype, device=value.device)


def _only(places: Sequence[LoopPlace]) -> LoopPlace:
    (place,) = places
    return place


_WAYS: Mapping[tuple[OpOverload, str], Emit] = {
    (piper.attention.default, RING): _ring,
    (piper.attention.default, GATHER): _gather,
    (piper.attention_dgrad.default, RING): _ring_gradient,
    (piper.attention_dgrad.default, GATHER): _gather_gradient,
}
