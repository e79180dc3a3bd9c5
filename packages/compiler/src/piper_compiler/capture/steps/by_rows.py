"""Say whether what experts compute takes any number of rows and of experts."""

from __future__ import annotations

import operator

import torch
from torch import fx

from piper_compiler.capture.torch_api._torch_joint import OpOverload
from piper_compiler.capture.values import aliasing
from piper_ops import grouped_mm

aten = torch.ops.aten
DIMS: dict[object, tuple[int, int]] = {
    aten.split.Tensor: (2, 3),
    aten.split_with_sizes.default: (2, 3),
    aten.slice.Tensor: (1, 2),
    aten.cat.default: (1, 2),
    aten.transpose.int: (1, 3),
}
"""The arguments that say along which dimensions an op cuts, joins or turns: the first, and that behind the last one."""


def takes_any_rows(graph: fx.Graph) -> bool:
    """Return whether a graph of [rows, counts, *stacks] treats each row, and each expert, as any other one.

    It does if it consists of grouped products, of element-wise ops of rows or of stacks, which keep their shape, and of
    ops that cut, join or turn what a row or an expert has, such as a gate and what it multiplies in one matrix.
    """
    rows, counts, *stacks = graph.find_nodes(op="placeholder")
    kinds = {rows: "rows", counts: "counts", **dict.fromkeys(stacks, "stack")}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        given = [kinds.get(n) for n in node.all_input_nodes]
        if node.target is grouped_mm and given == ["rows", "counts", "stack"]:
            kinds[node] = "rows"
        elif (
            len(set(given)) == 1
            and given[0] in ("rows", "stack")
            and (_is_elementwise(node) or _is_within(node))
        ):
            kinds[node] = str(given[0])
        else:
            return False
    return True


def _is_elementwise(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or torch.Tag.pointwise not in node.target.tags:
        return False
    shape = aliasing.tensor(node).shape
    return all(aliasing.tensor(n).shape == shape for n in node.all_input_nodes)


def _is_within(node: fx.Node) -> bool:
    """Return whether an op cuts, joins or turns tensors along other dimensions than the first."""
    if node.target is operator.getitem:
        return True  # of several results, of which each is known
    if node.target not in DIMS or node.kwargs:
        return False
    first, end = DIMS[node.target]
    rank = aliasing.tensor(node.all_input_nodes[0]).dim()
    return all(isinstance(dim, int) and dim % rank for dim in node.args[first:end] or (0,))
