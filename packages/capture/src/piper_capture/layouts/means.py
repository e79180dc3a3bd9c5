"""Take a mean apart into a sum and a divisor, if devices share the elements that it reduces.

A mean over a device's own shard would divide by the number of elements there, and if a loss ignores some targets, these
numbers differ between shards. The sum becomes a partial sum; the divisor is the number of elements of the unsharded
tensor, or of all targets that count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

import piper_ops  # noqa: F401 - registers the ops
from piper_capture.graphs.stepgraph import Joint
from piper_capture.layouts.emit import Emitter, named_arguments
from piper_capture.layouts.rules.rules_losses import MEAN, SUM
from piper_capture.layouts.unfuse import Copies, rebuilt
from piper_capture.torch_api._torch import OpOverload
from piper_capture.values import aliasing

aten = torch.ops.aten
piper = torch.ops.piper
IGNORED = -100
"""The target that a loss ignores unless another is given."""
WIDE = (torch.float32, torch.float64)
MEANS: Mapping[OpOverload, OpOverload] = {
    aten.mean.default: aten.sum.default,
    aten.mean.dim: aten.sum.dim_IntList,
}
"""A mean -> the sum over the same elements."""
LOSSES: Mapping[OpOverload, str] = {
    piper.cross_entropy.default: "",
    piper.cross_entropy_dgrad.default: "grad_loss",
    **dict.fromkeys(
        (aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default), ""
    ),
    aten.mse_loss_backward.default: "grad_output",
    aten.smooth_l1_loss_backward.default: "grad_output",
    aten.huber_loss_backward.default: "grad_output",
}
"""A loss -> "", and the gradient of one -> its argument that is the gradient of the loss."""
OF_CLASSES = (piper.cross_entropy.default, piper.cross_entropy_dgrad.default)
"""The losses of targets that may be ignored. Their results are at least in single precision."""


def means_apart(joint: Joint, shared: Callable[[fx.Node], bool]) -> Joint:
    """Return a chunk with the means over `shared` elements taken apart; the given chunk stays as it is.

    A mean that is made in half precision stays one: its sum may be larger than that holds.
    """
    counts = _Counts()
    return rebuilt(joint, lambda n: _is_mean(n) and shared(n), counts.apart)


def _is_mean(node: fx.Node) -> bool:
    if node.target in OF_CLASSES:
        return bool(named_arguments(node).get("reduction", "mean") == "mean")
    if node.target not in MEANS and node.target not in LOSSES:
        return False
    return (
        aliasing.tensor(node).dtype in WIDE and named_arguments(node).get("reduction", MEAN) == MEAN
    )


class _Counts:
    """Take means apart, with one count of targets for a loss and its gradient."""

    def __init__(self) -> None:
        self._counted: dict[tuple[fx.Node, int], fx.Node] = {}

    def apart(self, graph: fx.Graph, node: fx.Node, env: Copies) -> tuple[fx.Node, ...]:
        """Add the nodes that replace a mean, and return the nodes of its results."""
        op, first = node.target, node.all_input_nodes[0].meta["val"]
        assert isinstance(op, OpOverload)
        emit = Emitter(graph, first.fake_mode)
        named = fx.node.map_arg(named_arguments(node), env.__getitem__)
        late = "backward" in str(node.meta["partitioner_tag"])
        with emit.like(node, late):
            if op in MEANS:
                count = first.numel() // aliasing.tensor(node).numel()
                return (_divided(emit, emit.op(node, MEANS[op], named), count),)
            return self._loss(emit, node, op, named)

    def _loss(
        self, emit: Emitter, node: fx.Node, op: OpOverload, given: Mapping[str, Any]
    ) -> tuple[fx.Node, ...]:
        count = self._count(emit, node, given)
        added = {**given, "reduction": "sum" if op in OF_CLASSES else SUM}
        if name := LOSSES[op]:
            return (emit.op(node, op, {**added, name: _divided(emit, given[name], count)}),)
        summed = emit.op(node, op, added)
        if op in OF_CLASSES:
            return _divided(emit, emit.item(summed, 0), count), emit.item(summed, 1)
        return (_divided(emit, summed, count),)

    def _count(self, emit: Emitter, node: fx.Node, given: Mapping[str, Any]) -> fx.Node | int:
        """Return the divisor of a mean loss: a number, or a node that counts the targets."""
        if node.target not in OF_CLASSES:
            return max(aliasing.tensor(given[name]).numel() for name in ("self", "target"))
        key = given["target"], int(given.get("ignore_index", IGNORED))
        if key not in self._counted:
            with emit.like(node, late=False):
                self._counted[key] = emit.call(aten.sum.default, emit.call(aten.ne.Scalar, *key))
        return self._counted[key]


def _divided(emit: Emitter, source: fx.Node, count: fx.Node | int) -> fx.Node:
    op = aten.div.Tensor if isinstance(count, fx.Node) else aten.div.Scalar
    return emit.call(op, source, count)
