"""Say how ops loop over a vocabulary: the rows of an embedding, and the classes of a cross-entropy.

A device that has a part of them cannot run the same op on it: a number that another device has is none of its own, and
a logsumexp is over all classes. Other ops compute these parts (`piper_ops.vocabulary`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from piper_compiler.capture import aliasing
from piper_compiler.capture._torch import OpOverload
from piper_compiler.capture.coordinate import Coordinate
from piper_compiler.capture.layouts.emit import Emitter
from piper_compiler.capture.layouts.loops import At, Loops, Nest, OpCall, Place, Rewrite
from piper_ops import (
    collectives,
    cross_entropy_joined,
    cross_entropy_part,
    cross_entropy_part_dgrad,
    embedding_part,
    embedding_part_dgrad,
)

aten = torch.ops.aten
piper = torch.ops.piper
OUT = -1
CLASSES = 1
"""The dimension of logits."""
Named = Mapping[str, Any]


def _embedding(call: OpCall) -> Loops:
    weight, indices = call.number("weight"), call.number("indices")
    rank = len(call.shape(indices))
    same = [((At(indices, d),), (At(OUT, d),)) for d in range(rank)]
    rows = At(weight, 0)
    return Loops(
        (*same, ((At(weight, 1),), (At(OUT, rank),))),
        whole=frozenset({rows}),
        linear=(frozenset({weight}),),
        rewrites={rows: Rewrite(_look_up, terms=True)},
    )


def _look_up(emit: Emitter, named: Named, places: Sequence[Place]) -> list[fx.Node]:
    return [emit.call(embedding_part, named["weight"], named["indices"], *_at(places))]


def _embedding_gradient(call: OpCall) -> Loops:
    """Return the loops of a table's gradient, a sum over all places of a number; their count is no such sum."""
    grad, indices = call.number("grad_output"), call.number("indices")
    rank = len(call.shape(indices))
    places = frozenset(At(indices, d) for d in range(rank))
    same = [((At(indices, d),), (At(grad, d),)) for d in range(rank)]
    loops = Loops((*same, ((At(grad, rank),), (At(OUT, 1),))), places, frozenset({At(OUT, 0)}), linear=(frozenset({grad}),))
    if call.get("scale_grad_by_freq"):
        return replace(loops, summed=frozenset(), whole=loops.whole | places)
    return replace(loops, rewrites={At(OUT, 0): Rewrite(_add_up, terms=True)})


def _add_up(emit: Emitter, named: Named, places: Sequence[Place]) -> list[fx.Node]:
    rows = int(named["num_weights"])
    for place in places:
        rows //= place.degree
    given = named["grad_output"], named["indices"], rows, *_at(places), named["padding_idx"]
    return [emit.call(embedding_part_dgrad, *given)]


def _reduction(call: OpCall) -> str:
    return str(call.get("reduction"))


def _cross_entropy(call: OpCall) -> Loops:
    logits, target, reduction = call.number("logits"), call.number("target"), _reduction(call)
    rows, classes = At(logits, 0), At(logits, CLASSES)
    same: list[tuple[Nest, Nest]] = [((rows,), (At(target, 0),)), ((rows,), (At(-2, 0),))]
    same += [((rows,), (At(-1, 0),))] if reduction == "none" else []
    return Loops(
        tuple(same),
        summed=frozenset({rows} if reduction == "sum" else ()),
        whole=frozenset({classes, rows} if reduction == "mean" else {classes}),
        rewrites={classes: Rewrite(_loss, terms=False)},
    )


def _loss(emit: Emitter, named: Named, places: Sequence[Place]) -> list[fx.Node]:
    """Exchange two numbers per token, and make the loss and the logsumexp of them."""
    target, options = named["target"], _options(named)
    ignored = {name: value for name, value in options.items() if name == "ignore_index"}
    found = emit.call(cross_entropy_part, named["logits"], target, *_at(places), **ignored)
    statistics = tuple(aliasing.tensor(found).shape)
    for place in places:
        found = emit.call(collectives.all_gather, found, place.axis, place.degree)
    joined = found if len(places) == 1 else emit.call(aten.view.default, found, [-1, *statistics])
    both = emit.call(cross_entropy_joined, joined, target, **options)
    return [emit.item(both, k) for k in range(2)]


def _cross_entropy_gradient(call: OpCall) -> Loops:
    logits, reduction, grad = call.number("logits"), _reduction(call), call.number("grad_loss")
    rows, classes = At(logits, 0), At(logits, CLASSES)
    like = [call.number("target"), call.number("logsumexp"), OUT, *([grad] if call.shape(grad) else [])]
    same: list[tuple[Nest, Nest]] = [((rows,), (At(k, 0),)) for k in like]
    return Loops(
        (*same, ((classes,), (At(OUT, CLASSES),))),
        whole=frozenset({classes, rows} if reduction == "mean" else {classes}),
        linear=(frozenset({grad}),),
        rewrites={classes: Rewrite(_loss_gradient, terms=False)},
    )


def _loss_gradient(emit: Emitter, named: Named, places: Sequence[Place]) -> list[fx.Node]:
    given = [named[name] for name in ("grad_loss", "logits", "target", "logsumexp")]
    return [emit.call(cross_entropy_part_dgrad, *given, *_at(places), **_options(named))]


def _options(named: Named) -> dict[str, Any]:
    return {name: named[name] for name in ("reduction", "ignore_index") if name in named}


def _at(places: Sequence[Place]) -> tuple[list[int], list[int], list[int]]:
    """Return places as the ops take them: the device's along each axis, of how many, and how much is inside."""
    return [Coordinate(p.axis) for p in places], [p.degree for p in places], [p.rest for p in places]


RULES: dict[OpOverload, Callable[[OpCall], Loops]] = {
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_gradient,
    piper.cross_entropy.default: _cross_entropy,
    piper.cross_entropy_dgrad.default: _cross_entropy_gradient,
}
