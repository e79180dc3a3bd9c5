"""Find the calls of a loss that change tensors in place, also through views of these."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable

import torch
from torch import Tensor, fx

from piper_capture.whole_batch.batch_loss.reductions import call_name

SAME = frozenset(
    {
        *(
            "view",
            "reshape",
            "flatten",
            "squeeze",
            "unsqueeze",
            "expand",
            "contiguous",
            "clone",
            "detach",
            "permute",
        ),
        *(
            "to",
            "float",
            "double",
            "half",
            "bfloat16",
            "type",
            "type_as",
            "cpu",
            "cuda",
            "neg",
            "getitem",
            "select",
        ),
        *(
            "transpose",
            "t",
            "movedim",
            "view_as",
            "reshape_as",
            "narrow",
            "ravel",
            "item",
            "_to_copy",
            "alias",
        ),
    }
)
"""The calls that are linear in their first argument; of another tensor they take the shape, dtype or device alone."""
LIKE_ANOTHER = {
    **dict.fromkeys(("to", "type_as"), "to"),
    **dict.fromkeys(("view_as", "reshape_as"), "reshape"),
    "expand_as": "expand",
}
"""The calls that may have a second tensor of whose numbers they read none, with the method that takes them instead."""
VIEWS = SAME - {"clone", "neg"}
"""The calls that may give a view of their first argument."""
_ALIKE = {
    "ones_like": 1.0,
    "zeros_like": 0.0,
    "new_ones": 1.0,
    "new_zeros": 0.0,
    "full_like": 1,
    "new_full": 2,
}
"""The calls that take no numbers from a tensor, with the number they fill in, or the place of its argument (an int)."""
AUGMENTED = frozenset(
    {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow}
)


def like_another(node: fx.Node) -> fx.Node | None:
    """Return the tensor that gives a call its shape, dtype or device alone, as logits do in `weight.to(logits)`."""
    if call_name(node) not in LIKE_ANOTHER or len(node.args) < 2:
        return None
    other = node.args[1]
    return other if isinstance(other, fx.Node) and not is_size(other) else None


def of_numbers(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a call, without a tensor of whose numbers it reads none."""
    other = like_another(node)
    return [n for n in node.all_input_nodes if n is not other or n is node.args[0]]


def ancestors(nodes: Iterable[fx.Node], *, shapes: bool = True) -> set[fx.Node]:
    """Return nodes with all of their ancestors; with `shapes`, also tensors that only give them a shape."""
    reached, queue = set[fx.Node](), list(nodes)
    while queue:
        node = queue.pop()
        if node not in reached:
            reached.add(node)
            if shapes:
                queue += node.all_input_nodes
            elif filling(node) is None:
                queue += of_numbers(node)
    return reached


def filling(node: fx.Node) -> float | None:
    """Return the number in a tensor that has only the shape and dtype of another; None for any other tensor."""
    position = _ALIKE.get(call_name(node)) if node.op in ("call_function", "call_method") else None
    if position is None or not isinstance(position, int):
        return position
    value = node.args[position] if len(node.args) > position else node.kwargs.get("fill_value")
    return float(value) if isinstance(value, int | float) else None


def writes(node: fx.Node) -> bool:
    """Return whether a call changes one of its arguments in place."""
    return written(node) is not None


def written(node: fx.Node) -> fx.Node | None:
    """Return the argument that a call changes in place; None if it changes none."""
    if node.op == "call_method":
        changes = str(node.target).endswith("_") and not str(node.target).endswith("__")
        target = node.args[0] if changes else None
    elif node.target is operator.setitem or node.target in AUGMENTED:
        target = node.args[0]
    else:
        target = node.kwargs.get("out")
    return target if isinstance(target, fx.Node) and not is_size(target) else None


def owner(node: fx.Node) -> fx.Node:
    """Return the node that made the tensor behind a node, which may be a view of it."""
    while node.op in ("call_function", "call_method"):
        changed = written(node)
        if changed is None and call_name(node) in VIEWS and isinstance(node.args[0], fx.Node):
            changed = node.args[0]
        if changed is None or _dtype(changed) != _dtype(node):
            break
        node = changed
    return node


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("example_value")
    return value.dtype if isinstance(value, Tensor) else None


def with_writers(
    graph: fx.Graph, nodes: Collection[fx.Node], *, shapes: bool = True
) -> set[fx.Node]:
    """Return nodes with the calls that change one of them in place, and the inputs of these (see `ancestors`)."""
    reached = set(nodes)
    while True:
        owners = {owner(n) for n in reached}
        writers = [
            (n, target)
            for n in graph.nodes
            if n not in reached and (target := written(n)) is not None
        ]
        more = (
            ancestors((n for n, target in writers if owner(target) in owners), shapes=shapes)
            - reached
        )
        if not more:
            return reached
        reached |= more


def is_size(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(
        value, torch.SymInt | torch.SymFloat | torch.SymBool | torch.Size | int | float
    )
