"""Add the gradients of further rounds of experts in place to the gradients of round 0, which always exist.

    add(experts_return_dgrad(...), experts_home(...))      -> experts_further_dgrad_(..., experts_home(...))
    acc += experts_return_wgrad(...)[k] + wgrad            -> experts_further_wgrad_(..., accumulators); acc += wgrad
    acc += grouped_mm_wgrad(rows, counts, grad)            -> grouped_mm_wgrad_(rows, counts, grad, acc), in such a step

Mostly there are no further rounds. The functional forms would still add zeros of the size of all rows and matrices.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from piper_capture.graphs.inplace import SUMMED
from piper_capture.graphs.stepgraph import StepGraph
from piper_capture.values import aliasing
from piper_ops import (
    experts_further_dgrad_,
    experts_further_wgrad_,
    experts_home,
    experts_return_dgrad,
    experts_return_wgrad,
    grouped_mm_wgrad,
    grouped_mm_wgrad_,
)

aten = torch.ops.aten


def add_further_rounds_in_place(step: StepGraph) -> None:
    """Rewrite the gradients of further rounds of a step."""
    for node in step.graph.find_nodes(op="call_function", target=experts_return_dgrad):
        _add_rows(step, node)
    for node in step.graph.find_nodes(op="call_function", target=experts_return_wgrad):
        _add_matrices(step, node)


def _only_add(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the addition that is the only user of a gradient, and its other term; None if there is none."""
    users = list(node.users)
    if len(users) != 1 or users[0].target is not aten.add.Tensor or users[0].kwargs:
        return None
    others = [a for a in users[0].args if a is not node]
    return (users[0], others[0]) if len(others) == 1 and isinstance(others[0], fx.Node) else None


def _add_rows(step: StepGraph, further: fx.Node) -> None:
    addition = _only_add(further)
    if addition is None or addition[1].target is not experts_home or len(addition[1].users) != 1:
        return
    added, home = addition
    added.target, added.args = experts_further_dgrad_, (*further.args, home)
    step.graph.erase_node(further)


def _add_matrices(step: StepGraph, further: fx.Node) -> None:
    items = sorted(further.users, key=lambda item: int(item.args[1]))  # type: ignore[arg-type]  # getitem: (source, index)
    sums = [_accumulated(item) for item in items]
    if not items or any(found is None for found in sums) or len(items) != len(further.meta["val"]):
        return
    found = [one for one in sums if one is not None]
    accumulators = [accumulate.args[0] for accumulate, _ in found]
    for item, (accumulate, other) in zip(items, found, strict=True):
        (added,) = item.users
        accumulate.args = (accumulate.args[0], other)
        step.graph.erase_node(added)
        step.graph.erase_node(item)
        _add_product(step, accumulate)
    with step.graph.inserting_before(further):
        args = (*further.args, accumulators[1:], accumulators[0])
        node = step.graph.call_function(experts_further_wgrad_, args)
    assert isinstance(accumulators[0], fx.Node)
    node.meta = {**further.meta, "val": accumulators[0].meta["val"]}
    step.graph.erase_node(further)


def _accumulated(item: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the accumulation of a gradient of further rounds, and the gradient of round 0; None if there is none."""
    addition = _only_add(item) if item.target is operator.getitem else None
    if addition is None or len(addition[0].users) != 1:
        return None
    added, other = addition
    (accumulate,) = added.users
    total = accumulate.args[0]
    if (
        accumulate.target is not aten.add_.Tensor
        or not isinstance(total, fx.Node)
        or total.op != "placeholder"
    ):
        return None
    return (accumulate, other) if _summed((added, total)) else None


def _summed(nodes: Sequence[fx.Node]) -> bool:
    dtypes = {aliasing.tensor(n).dtype for n in nodes}
    return len(dtypes) == 1 and dtypes <= set(SUMMED)


def _add_product(step: StepGraph, accumulate: fx.Node) -> None:
    total, product = accumulate.args
    if (
        isinstance(product, fx.Node)
        and product.target is grouped_mm_wgrad
        and len(product.users) == 1
    ):
        accumulate.target, accumulate.args = grouped_mm_wgrad_, (*product.args, total)
        step.graph.erase_node(product)
