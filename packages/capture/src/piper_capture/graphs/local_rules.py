"""Rules that look at one op of a joint graph and its arguments: fewer views, fewer copies, shorter lifetimes.

In a functional graph no tensor is overwritten, so a copy can be replaced by its source, and only the outputs of a step
must own their bytes (`phases` ensures this).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from piper_capture.graphs.rewriting import COPIES, new_node
from piper_capture.torch_api._torch_joint import OpOverload
from piper_capture.values import aliasing

aten = torch.ops.aten
IDENTITIES = frozenset(
    {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default}
)
VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})
SHAPE_ONLY: dict[OpOverload, tuple[OpOverload, Any]] = {
    aten.zeros_like.default: (aten.zeros.default, None),
    aten.new_zeros.default: (aten.zeros.default, None),
    aten.ones_like.default: (aten.ones.default, None),
    aten.new_ones.default: (aten.ones.default, None),
    aten.empty_like.default: (aten.empty.memory_format, None),
    aten.new_empty.default: (aten.empty.memory_format, None),
    aten.full_like.default: (aten.full.default, 1),
    aten.new_full.default: (aten.full.default, 2),
}
"""The ops that read a tensor for its shape, dtype and device only, each with (factory, index of the fill value)."""
REDUCED: dict[OpOverload, int] = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
}
"""The losses whose kernels keep all terms in the result's storage, each with the index of its reduction argument."""
REDUCTIONS: tuple[OpOverload | None, ...] = (None, aten.mean.default, aten.sum.default)
"""The reduction ops, by torch's number for each: 0 is no reduction."""


def _same_spec(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def drop_identity(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    argument = node.args[0] if node.args else None
    return argument if node.target in IDENTITIES and isinstance(argument, fx.Node) else None


def drop_copy(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    if node.target not in COPIES:
        return None
    argument = node.args[0]
    assert isinstance(argument, fx.Node)
    before, after = aliasing.tensor(argument), aliasing.tensor(node)
    return (
        argument
        if _same_spec(before, after) and before.is_contiguous() and after.is_contiguous()
        else None
    )


def drop_overwrite(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    if node.target is not aten.copy.default or any(
        u.target is aten.as_strided.default for u in node.users
    ):
        return None
    argument = node.args[1]
    assert isinstance(argument, fx.Node)
    return argument if _same_spec(aliasing.tensor(argument), aliasing.tensor(node)) else None


def drop_shape_source(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    assert isinstance(node.target, OpOverload)
    factory, fill = SHAPE_ONLY.get(node.target, (None, None))
    value = node.meta.get("val")
    if factory is None or not isinstance(value, torch.Tensor) or not value.is_contiguous():
        return None
    fills = () if fill is None else (node.args[fill],)
    return new_node(
        graph, node, factory, (list(value.shape), *fills), dtype=value.dtype, device=value.device
    )


def fold_permutes(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    outer = _permutation(node)
    inner_node = node.args[0] if node.args else None
    if outer is None or not isinstance(inner_node, fx.Node):
        return None
    inner = _permutation(inner_node)
    if inner is None:
        return None
    base = inner_node.args[0]
    assert isinstance(base, fx.Node)
    order = [inner[d] for d in outer]
    return (
        base
        if order == sorted(order)
        else new_node(graph, node, aten.permute.default, (base, order))
    )


def _permutation(node: fx.Node) -> list[int] | None:
    if node.op != "call_function":
        return None
    rank = len(aliasing.tensor(node).shape) if isinstance(node.meta.get("val"), torch.Tensor) else 0
    order = list(range(rank))
    if node.target is aten.t.default:
        return order[::-1]
    if node.target is aten.transpose.int:
        a, b = (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]  # transpose: two ints
        order[a], order[b] = order[b], order[a]
        return order
    if node.target is aten.permute.default:
        return [int(d) % rank for d in node.args[1]]  # type: ignore[arg-type, union-attr]  # permute: a list of ints
    return None


def select_first(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Select parts of a permuted tensor (q, k, v of a fused projection) from the tensor before the permutation.

    This leaves one permutation per part that needs one, instead of one of the whole tensor and one per part.
    """
    inner = node.args[0] if node.args else None
    order = (
        _permutation(inner)
        if isinstance(inner, fx.Node) and node.target is aten.select.int
        else None
    )
    if order is None:
        return None
    assert isinstance(inner, fx.Node)
    base = inner.args[0]
    dim, index = (int(a) for a in node.args[1:3])  # type: ignore[arg-type]  # select: two ints
    taken = order.pop(dim % len(order))
    part = new_node(graph, node, aten.select.int, (base, taken, index))
    part.meta["val"] = aliasing.tensor(base).select(taken, index)  # type: ignore[arg-type]  # a view's base is a node
    order = [d - (d > taken) for d in order]
    return (
        part
        if order == sorted(order)
        else new_node(graph, node, aten.permute.default, (part, order))
    )


def permute_first(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Permute the parts of a stack instead of the stack, which would be copied.

    Permuting a part is a view, which folds with the part's own permutation.
    """
    inner = node.args[0] if node.args else None
    order = _permutation(node)
    if (
        order is None
        or not isinstance(inner, fx.Node)
        or inner.target is not aten.stack.default
        or len(inner.users) > 1
    ):
        return None
    parts, *rest = inner.args
    dim = int(rest[0]) % len(order) if rest else 0  # type: ignore[arg-type]  # stack: an int
    place = order.index(dim)
    order = [d - (d > dim) for d in order if d != dim]
    permuted = []
    for part in parts:  # type: ignore[union-attr]  # stack: a list of nodes
        view = new_node(graph, node, aten.permute.default, (part, order))
        view.meta["val"] = aliasing.tensor(part).permute(order)  # type: ignore[arg-type]  # a stack's parts are nodes
        permuted.append(fold_permutes(graph, view) or view)
    stack = new_node(graph, node, aten.stack.default, (permuted, place))
    stack.meta["val"] = aliasing.tensor(node).contiguous()
    return stack


def fold_views(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    base = node.args[0] if node.args else None
    if node.target not in VIEWS or not isinstance(base, fx.Node):
        return None
    while base.target in VIEWS:
        base = base.args[0]
        assert isinstance(base, fx.Node)
    shape = list(aliasing.tensor(node).shape)
    if list(aliasing.tensor(base).shape) == shape:
        return base
    return None if base is node.args[0] else new_node(graph, node, aten.view.default, (base, shape))


def squeeze_sum(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    total = node.args[0] if node.args else None
    if (
        node.target not in VIEWS
        or not isinstance(total, fx.Node)
        or total.target is not aten.sum.dim_IntList
    ):
        return None
    source, dims, *rest = total.args
    assert isinstance(source, fx.Node)
    if not (rest and rest[0]) or total.kwargs or len(total.users) > 1:
        return None
    before = aliasing.tensor(source)
    summed = {int(d) % before.dim() for d in dims}  # type: ignore[arg-type, union-attr]  # sum: a list of ints
    left = [size for d, size in enumerate(before.shape) if d not in summed]
    return (
        new_node(graph, node, aten.sum.dim_IntList, (source, dims))
        if list(aliasing.tensor(node).shape) == left
        else None
    )


def drop_expand(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    argument = node.args[0] if node.args else None
    if node.target is not aten.expand.default or not isinstance(argument, fx.Node):
        return None
    return argument if aliasing.tensor(argument).shape == aliasing.tensor(node).shape else None


def reduce_apart(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Split a loss and its reduction into two ops, as its kernel computes them; the result's storage is then small."""
    assert isinstance(node.target, OpOverload)
    place = REDUCED.get(node.target)
    if place is None:
        return None
    arguments = node.target._schema.arguments[len(node.args) :]
    operands = [*node.args, *(node.kwargs.get(a.name, a.default_value) for a in arguments)]
    reduce = REDUCTIONS[int(operands[place])]  # type: ignore[arg-type]  # an int
    if reduce is None:
        return None
    operands[place] = 0
    terms = new_node(graph, node, node.target, tuple(operands))
    terms.meta["val"] = node.target(*fx.node.map_arg(operands, aliasing.tensor))
    return new_node(graph, node, reduce, (terms,))
