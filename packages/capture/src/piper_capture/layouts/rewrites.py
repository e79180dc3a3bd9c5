"""Replace ops so that they can be sharded along a vocabulary or a block: rows of an embedding, classes of a loss, ...

A device with a shard of them cannot run the same op on it: a token's row may be on another device, and a logsumexp is
over all classes. The ops of `piper_ops.pointwise.vocabulary` compute the shards. Nor is the largest magnitude of a
shard that of a tensor which is quantised with one scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from piper_capture.layouts.emit import Emitter
from piper_capture.layouts.loops import DimOf, LoopPlace, LoopRewrite, OpCall
from piper_capture.values import aliasing
from piper_capture.values.coordinate import Coordinate
from piper_ops import (
    all_gather,
    cross_entropy_joined,
    cross_entropy_part,
    cross_entropy_part_dgrad,
    embedding_part,
    embedding_part_dgrad,
    float8_scale,
)

aten = torch.ops.aten
piper = torch.ops.piper
OUT = -1
CLASSES = 1
"""The dimension of logits."""
OpArguments = Mapping[str, Any]


def _look_up(emit: Emitter, named: OpArguments, places: Sequence[LoopPlace]) -> list[fx.Node]:
    return [emit.call(embedding_part, named["weight"], named["indices"], *_at(places))]


def _add_up(emit: Emitter, named: OpArguments, places: Sequence[LoopPlace]) -> list[fx.Node]:
    rows = int(named["num_weights"])
    for place in places:
        rows //= place.degree
    args = named["grad_output"], named["indices"], rows, *_at(places), named["padding_idx"]
    return [emit.call(embedding_part_dgrad, *args)]


def _loss(emit: Emitter, named: OpArguments, places: Sequence[LoopPlace]) -> list[fx.Node]:
    """All-reduce two numbers per token, and compute the loss and the logsumexp from them."""
    target, options = named["target"], _options(named)
    ignored = {name: value for name, value in options.items() if name == "ignore_index"}
    parts = emit.call(cross_entropy_part, named["logits"], target, *_at(places), **ignored)
    statistics = tuple(aliasing.tensor(parts).shape)
    for place in places:
        parts = emit.call(all_gather, parts, place.axis, place.degree)
    joined = parts if len(places) == 1 else emit.call(aten.view.default, parts, [-1, *statistics])
    both = emit.call(cross_entropy_joined, joined, target, **options)
    return [emit.item(both, k) for k in range(2)]


def _loss_gradient(emit: Emitter, named: OpArguments, places: Sequence[LoopPlace]) -> list[fx.Node]:
    args = [named[name] for name in ("grad_loss", "logits", "target", "logsumexp")]
    return [emit.call(cross_entropy_part_dgrad, *args, *_at(places), **_options(named))]


def _scale(emit: Emitter, named: OpArguments, places: Sequence[LoopPlace]) -> list[fx.Node]:
    """Gather the scales of all devices' parts of a block: the block's scale is the least of them."""
    scale = emit.call(float8_scale, *named.values())
    shape = tuple(aliasing.tensor(scale).shape)
    for place in places:
        parts = emit.call(all_gather, scale, place.axis, place.degree)
        apart = emit.call(aten.view.default, parts, [place.degree, *shape])
        scale = emit.call(aten.amin.default, apart, [0])
    return [scale]


def _options(named: OpArguments) -> dict[str, Any]:
    return {name: named[name] for name in ("reduction", "ignore_index") if name in named}


def _at(places: Sequence[LoopPlace]) -> tuple[list[int], list[int], list[int]]:
    """Return places as the ops take them: for each axis the device's coordinate, the degree and the size inside."""
    return (
        [Coordinate(p.axis) for p in places],
        [p.degree for p in places],
        [p.rest for p in places],
    )


def rewrites_of(call: OpCall) -> Mapping[DimOf, LoopRewrite]:
    """Return the dimensions of a call along which it can be sharded only if other ops replace it."""
    match call.op:
        case aten.embedding.default:
            return {DimOf(call.number("weight"), 0): LoopRewrite(_look_up, partial=True)}
        case aten.embedding_dense_backward.default if not call.get("scale_grad_by_freq"):
            return {DimOf(OUT, 0): LoopRewrite(_add_up, partial=True)}
        case piper.cross_entropy.default:
            return {DimOf(call.number("logits"), CLASSES): LoopRewrite(_loss, partial=False)}
        case piper.cross_entropy_dgrad.default:
            return dict.fromkeys(
                (DimOf(call.number("logits"), CLASSES), DimOf(OUT, CLASSES)),
                LoopRewrite(_loss_gradient, partial=False),
            )
        case piper.float8_scale.default:
            sizes = call.get("rows"), call.get("columns")
            whole = [DimOf(0, dim) for dim, size in enumerate(sizes) if size == 0]
            return dict.fromkeys(whole, LoopRewrite(_scale, partial=False))
    return {}
