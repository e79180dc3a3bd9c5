"""Rewrite a functionalised joint graph without changing values: fewer views, fewer copies, shorter lifetimes.

In a functional graph no tensor is overwritten, so a copy can be replaced by its source, and only the outputs of a step
must own their bytes (`phases` ensures this). The rules, each local to a node:

    detach(x), alias(x), lift_fresh(x)          -> x
    clone(x), same-dtype copy of contiguous x   -> x
    copy(destination, x) of equal spec          -> x              (autograd's slice assignment)
    zeros_like(x), new_zeros(x, ...), ...       -> zeros(...)     (x was read for its shape only)
    t(t(x)), transpose twice, permute twice     -> x or one permute
    view(view(x)), view to the same shape       -> view(x), x
    view(sum(x, dims, keepdim)) without them    -> sum(x, dims)
    select(permute(x))                          -> permute(select(x)), or select(x)
    permute(stack([x, y]))                      -> stack([permute(x), permute(y)]) in another dimension
    expand to the same shape                    -> x
    mse_loss(x, y), ..., reduced                -> mean(mse_loss(x, y)), or sum, of its terms
    two equal views of one node                 -> one
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from piper_capture.graphs.closures import ancestors, drawn_before
from piper_capture.torch_api._torch_joint import OpOverload
from piper_capture.values import aliasing

aten = torch.ops.aten
IDENTITIES = frozenset(
    {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default}
)
COPIES = frozenset({aten.clone.default, aten._to_copy.default})
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


def simplify(graph: fx.Graph, buffers: Collection[fx.Node] = ()) -> None:
    """Rewrite `graph` in place.

    A copy of one of the `buffers` stays, because backward may read it after the buffer has changed.
    """
    views: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        if node.target in COPIES and aliasing.root(node.all_input_nodes[0]) in buffers:
            continue
        simpler = _apply(graph, node)
        if simpler.op == "call_function" and aliasing.is_view(simpler):
            key = (
                simpler.target,
                _freeze(simpler.args),
                _freeze(simpler.kwargs),
                simpler.meta.get("partitioner_tag"),
            )
            simpler = _replace(graph, simpler, views.setdefault(key, simpler))
    drawn = set(drawn_before(ancestors([graph.output_node()]), graph.nodes))
    graph.eliminate_dead_code(
        is_impure_node=lambda n: n.op in ("placeholder", "output") or n in drawn
    )


def _apply(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return `node` after all rules; a rule that returns an older, already simple node ends the search."""
    for rule in RULES:
        replacement = rule(graph, node)
        if replacement is not None:
            is_new = not replacement.users
            node = _replace(graph, node, replacement)
            if not is_new:
                break
    return node


def _replace(graph: fx.Graph, node: fx.Node, by: fx.Node) -> fx.Node:
    if by is not node:
        node.replace_all_uses_with(by)
        graph.erase_node(node)
    return by


def _freeze(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_freeze(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _freeze(v)) for k, v in sorted(value.items()))
    return (type(value), value)


def _same_spec(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _node(
    graph: fx.Graph, before: fx.Node, target: OpOverload, args: tuple[Any, ...], **kwargs: Any
) -> fx.Node:
    """Return a new node with the meta of the node that it replaces."""
    with graph.inserting_before(before):
        new = graph.call_function(target, args, kwargs)
    new.meta = dict(before.meta)
    return new


def _drop_identity(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    argument = node.args[0] if node.args else None
    return argument if node.target in IDENTITIES and isinstance(argument, fx.Node) else None


def _drop_copy(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
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


def _drop_overwrite(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    if node.target is not aten.copy.default or any(
        u.target is aten.as_strided.default for u in node.users
    ):
        return None
    argument = node.args[1]
    assert isinstance(argument, fx.Node)
    return argument if _same_spec(aliasing.tensor(argument), aliasing.tensor(node)) else None


def _drop_shape_source(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    assert isinstance(node.target, OpOverload)
    factory, fill = SHAPE_ONLY.get(node.target, (None, None))
    value = node.meta.get("val")
    if factory is None or not isinstance(value, torch.Tensor) or not value.is_contiguous():
        return None
    fills = () if fill is None else (node.args[fill],)
    return _node(
        graph, node, factory, (list(value.shape), *fills), dtype=value.dtype, device=value.device
    )


def _fold_permutes(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
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
        base if order == sorted(order) else _node(graph, node, aten.permute.default, (base, order))
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


def _select_first(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
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
    part = _node(graph, node, aten.select.int, (base, taken, index))
    part.meta["val"] = aliasing.tensor(base).select(taken, index)  # type: ignore[arg-type]  # a view's base is a node
    order = [d - (d > taken) for d in order]
    return (
        part if order == sorted(order) else _node(graph, node, aten.permute.default, (part, order))
    )


def _permute_first(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
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
        view = _node(graph, node, aten.permute.default, (part, order))
        view.meta["val"] = aliasing.tensor(part).permute(order)  # type: ignore[arg-type]  # a stack's parts are nodes
        permuted.append(_fold_permutes(graph, view) or view)
    stack = _node(graph, node, aten.stack.default, (permuted, place))
    stack.meta["val"] = aliasing.tensor(node).contiguous()
    return stack


def _fold_views(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    base = node.args[0] if node.args else None
    if node.target not in VIEWS or not isinstance(base, fx.Node):
        return None
    while base.target in VIEWS:
        base = base.args[0]
        assert isinstance(base, fx.Node)
    shape = list(aliasing.tensor(node).shape)
    if list(aliasing.tensor(base).shape) == shape:
        return base
    return None if base is node.args[0] else _node(graph, node, aten.view.default, (base, shape))


def _squeeze_sum(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
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
        _node(graph, node, aten.sum.dim_IntList, (source, dims))
        if list(aliasing.tensor(node).shape) == left
        else None
    )


def _drop_expand(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    argument = node.args[0] if node.args else None
    if node.target is not aten.expand.default or not isinstance(argument, fx.Node):
        return None
    return argument if aliasing.tensor(argument).shape == aliasing.tensor(node).shape else None


def _reduce_apart(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Split a loss and its reduction into two ops, as its kernel computes them; the result's storage is then small."""
    assert isinstance(node.target, OpOverload)
    place = REDUCED.get(node.target)
    if place is None:
        return None
    arguments = node.target._schema.arguments[len(node.args) :]
    given = [*node.args, *(node.kwargs.get(a.name, a.default_value) for a in arguments)]
    reduce = REDUCTIONS[int(given[place])]  # type: ignore[arg-type]  # an int
    if reduce is None:
        return None
    given[place] = 0
    terms = _node(graph, node, node.target, tuple(given))
    terms.meta["val"] = node.target(*fx.node.map_arg(given, aliasing.tensor))
    return _node(graph, node, reduce, (terms,))


Rule = Callable[[fx.Graph, fx.Node], fx.Node | None]
RULES: tuple[Rule, ...] = (
    _drop_identity,
    _drop_copy,
    _drop_overwrite,
    _drop_shape_source,
    _fold_permutes,
    _select_first,
    _permute_first,
    _fold_views,
    _squeeze_sum,
    _drop_expand,
    _reduce_apart,
)
