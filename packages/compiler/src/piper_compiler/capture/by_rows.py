"""Say whether what experts compute takes any number of rows and of experts."""

from __future__ import annotations

import torch
from torch import fx

from piper_compiler.capture import aliasing
from piper_compiler.capture._torch_joint import OpOverload
from piper_ops import grouped_mm


def takes_any_rows(graph: fx.Graph) -> bool:
    """Return whether a graph of [rows, counts, *stacks] treats each row, and each expert, as any other one.

    It does if it consists of grouped products, and of element-wise ops of rows or of stacks, which keep their shape.
    """
    rows, counts, *stacks = graph.find_nodes(op="placeholder")
    kinds = {rows: "rows", counts: "counts", **dict.fromkeys(stacks, "stack")}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        given = [kinds.get(n) for n in node.all_input_nodes]
        if node.target is grouped_mm and given == ["rows", "counts", "stack"]:
            kinds[node] = "rows"
        elif _is_elementwise(node) and len(set(given)) == 1 and given[0] in ("rows", "stack"):
            kinds[node] = str(given[0])
        else:
            return False
    return True


def _is_elementwise(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or torch.Tag.pointwise not in node.target.tags:
        return False
    shape = aliasing.tensor(node).shape
    return all(aliasing.tensor(n).shape == shape for n in node.all_input_nodes)
