"""Let ops get operands of one dtype whose kernels give another dtype for mixed ones than their fake kernels say.

A plan, and the compiled form of the op that reads the result, take the dtype of the fake kernel. With operands of
bfloat16 and float32 it is not that of torch's kernel on a CPU for some ops, and other kernels refuse such operands. So
they become the widest of their dtypes first, as in type promotion.
"""

from __future__ import annotations

import operator
from functools import reduce

import torch
from torch import fx

from piper_capture.graphs.rewriting import new_node
from piper_capture.values import aliasing

aten = torch.ops.aten
LOSSES = frozenset(
    {
        aten.mse_loss.default,
        aten.mse_loss_backward.default,
        aten.smooth_l1_loss.default,
        aten.smooth_l1_loss_backward.default,
        aten.huber_loss.default,
        aten.huber_loss_backward.default,
        aten.soft_margin_loss.default,
        aten.soft_margin_loss_backward.default,
        aten.binary_cross_entropy.default,
        aten.binary_cross_entropy_backward.default,
    }
)
GROUP_NORM = frozenset({aten.native_group_norm.default, aten.native_group_norm_backward.default})


def one_dtype(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Return an op with operands of one dtype; None if they are of one, or if the op takes several."""
    if node.target not in LOSSES | GROUP_NORM:
        return None
    floating = [n for n in node.all_input_nodes if aliasing.tensor(n).dtype.is_floating_point]
    dtypes = {aliasing.tensor(n).dtype for n in floating}
    if len(dtypes) < 2:
        return None
    widest = reduce(torch.promote_types, dtypes)
    wide = {
        n: _cast(graph, node, n, widest) for n in floating if aliasing.tensor(n).dtype != widest
    }
    args = fx.node.map_arg(node.args, lambda n: wide.get(n, n))
    new = new_node(graph, node, node.target, args, **node.kwargs)
    if node.target in LOSSES:
        return new
    results = node.target(*fx.node.map_arg(args, aliasing.tensor), **node.kwargs)
    new.meta["val"] = results
    for item in [u for u in node.users if u.target is operator.getitem]:
        _give_back(graph, item, results[item.args[1]])
    return new


def _cast(graph: fx.Graph, before: fx.Node, source: fx.Node, dtype: torch.dtype) -> fx.Node:
    cast = new_node(graph, before, aten._to_copy.default, (source,), dtype=dtype)
    cast.meta["val"] = aliasing.tensor(source).to(dtype)
    return cast


def _give_back(graph: fx.Graph, item: fx.Node, result: torch.Tensor) -> None:
    """Give an item of a group norm its new value, and cast it for its readers to the dtype that it had."""
    said = aliasing.tensor(item).dtype
    item.meta["val"] = result
    if result.dtype == said or item.args[1] > 0:  # type: ignore[operator]  # a number: statistics stay wide
        return
    readers = [*item.users]
    with graph.inserting_after(item):
        narrow = graph.call_function(aten._to_copy.default, (item,), {"dtype": said})
    narrow.meta = {**item.meta, "val": result.to(said)}
    for reader in readers:
        reader.replace_input_with(item, narrow)
