"""Find whether the experts' computation accepts any number of rows and of experts."""

from __future__ import annotations

import operator

import torch
from torch import fx

from piper_capture.torch_api._torch_joint import OpOverload
from piper_capture.values import aliasing
from piper_ops import grouped_add, grouped_mm

aten = torch.ops.aten
DIMS: dict[object, tuple[int, int]] = {
    aten.split.Tensor: (2, 3),
    aten.split_with_sizes.default: (2, 3),
    aten.slice.Tensor: (1, 2),
    aten.cat.default: (1, 2),
    aten.transpose.int: (1, 3),
}
"""The range of arguments that are dimensions, for ops that split, concatenate or transpose: (first, end)."""


def takes_any_rows(graph: fx.Graph) -> bool:
    """Return whether a graph of [rows, counts, *stacks] treats all rows alike, and all experts alike.

    It does if it consists of grouped products and biases, of element-wise ops of rows or of stacks that keep the shape,
    and of ops that split, concatenate or transpose other dimensions, such as a fused gate and up projection.
    """
    rows, counts, *stacks = graph.find_nodes(op="placeholder")
    kinds = {rows: "rows", counts: "counts", **dict.fromkeys(stacks, "stack")}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        input_kinds = [kinds.get(n) for n in node.all_input_nodes]
        if node.target in (grouped_mm, grouped_add) and input_kinds == ["rows", "counts", "stack"]:
            kinds[node] = "rows"
        elif (
            len(set(input_kinds)) == 1
            and input_kinds[0] in ("rows", "stack")
            and (_is_elementwise(node) or _is_within(node))
        ):
            kinds[node] = str(input_kinds[0])
        else:
            return False
    return True


def _is_elementwise(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or torch.Tag.pointwise not in node.target.tags:
        return False
    shape = aliasing.tensor(node).shape
    return all(aliasing.tensor(n).shape == shape for n in node.all_input_nodes)


def _is_within(node: fx.Node) -> bool:
    """Return whether an op splits, concatenates or transposes tensors along other dimensions than the first."""
    if node.target is operator.getitem:
        return True  # one of several results, which have the kind of their op
    if node.target not in DIMS or node.kwargs:
        return False
    first, end = DIMS[node.target]
    rank = aliasing.tensor(node.all_input_nodes[0]).dim()
    return all(isinstance(dim, int) and dim % rank for dim in node.args[first:end] or (0,))
