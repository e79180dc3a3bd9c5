"""Write results into tensors that are not used afterwards, instead of into new storages.

These rewrites of a step's graph also reduce the memory of a plan: an in-place op makes no storage.

    add(a, b)                       -> add_(a, b), or add_(b, a)       element-wise, over an argument that dies there
    all_reduce(a)                   -> all_reduce_(a)                  likewise, over all devices of an axis
    gelu_backward(g, x)             -> gelu_backward(g, x, grad_input=g)
    add_(acc, mm(a, b))             -> addmm_(acc, a, b)               the product is added to its accumulator
    add_(acc, mul(x, s))            -> addcmul_(acc, x, s)             so is a scaled tensor of an earlier step

An argument takes the result if it was made in this step, covers its whole storage (no slice, not expanded), has the
result's spec and strides, shares no bytes with another argument, and has its last use here. Every element is computed
from the same numbers by the same kernel, so the result is bitwise equal. `addmm_` rounds differently than a product and
an addition, as another blocking of the matrix product would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from piper_capture.graphs.stepgraph import StepGraph
from piper_capture.torch_api._torch_joint import OpOverload
from piper_capture.values import aliasing
from piper_ops import all_reduce, all_reduce_, context_add, context_add_, reduce_scatter, wait

aten = torch.ops.aten


@dataclass(frozen=True)
class InPlace:
    """Describe the in-place form of an element-wise op.

    Attributes:
        form: the op.
        takers: indexes of the arguments that can take the result; any but the first is swapped with it.
        out: the keyword argument for the taker, for a form that has one.
    """

    form: OpOverload
    takers: tuple[int, ...] = (0,)
    out: str = ""


FORMS: Mapping[OpOverload, InPlace] = {
    aten.add.Tensor: InPlace(aten.add_.Tensor, (0, 1)),
    aten.mul.Tensor: InPlace(aten.mul_.Tensor, (0, 1)),
    aten.sub.Tensor: InPlace(aten.sub_.Tensor),
    aten.div.Tensor: InPlace(aten.div_.Tensor),
    aten.relu.default: InPlace(aten.relu_.default),
    aten.tanh.default: InPlace(aten.tanh_.default),
    aten.sigmoid.default: InPlace(aten.sigmoid_.default),
    aten.exp.default: InPlace(aten.exp_.default),
    aten.neg.default: InPlace(aten.neg_.default),
    aten.gelu_backward.default: InPlace(aten.gelu_backward.grad_input, out="grad_input"),
    aten.silu_backward.default: InPlace(aten.silu_backward.grad_input, out="grad_input"),
    aten.tanh_backward.default: InPlace(aten.tanh_backward.grad_input, out="grad_input"),
    aten.sigmoid_backward.default: InPlace(aten.sigmoid_backward.grad_input, out="grad_input"),
    all_reduce: InPlace(all_reduce_),
    context_add: InPlace(context_add_),
    aten.threshold_backward.default: InPlace(aten.threshold_backward.grad_input, out="grad_input"),
}
"""The ops with an in-place form, whose kernels read each element of that argument only to write the same one."""


SUMMED = (torch.float32, torch.float64)
"""The dtypes of products that `addmm_` adds to an accumulator of the same dtype, the only one that it takes."""


def reuse_dying_arguments(step: StepGraph) -> None:
    """Make the element-wise ops of a step, and its all-reduces, in-place ops."""
    rank = {n: i for i, n in enumerate(step.graph.nodes)}
    last: dict[fx.Node, int] = {}
    for node in step.graph.nodes:
        for argument in node.all_input_nodes:
            last[aliasing.root(argument)] = rank[node]
    for node in step.graph.nodes:
        form = FORMS.get(node.target) if node.op == "call_function" else None
        if form is None or (
            node.kwargs and len(form.takers) > 1
        ):  # add's alpha belongs to its second term
            continue
        for index in form.takers:
            taker = node.args[index]
            if not isinstance(taker, fx.Node):
                continue
            base = aliasing.root(taker)
            shared = any(aliasing.root(a) is base for a in node.all_input_nodes if a is not taker)
            if (
                last[base] == rank[node]
                and not shared
                and _holds(taker, base, node)
                and node.args.count(taker) == 1
            ):
                _write_into(node, index, form)
                # From here on the result uses the argument's storage.
                last[base] = last[node]
                break


def copy_spoiled_operands(step: StepGraph) -> None:
    """Let a collective that leaves its operand undefined take a copy, if anything else may read that memory later.

    An operand with other strides is copied where it is sent.
    """
    rank = {n: i for i, n in enumerate(step.graph.nodes)}
    last: dict[fx.Node, int] = {}
    for node in step.graph.nodes:
        read = node.all_input_nodes[:1] if node.target is wait else node.all_input_nodes
        for argument in read:  # a wait keeps the operand and does not read it
            last[aliasing.root(argument)] = rank[node]
    for node in step.graph.find_nodes(op="call_function", target=reduce_scatter):
        operand = node.args[0]
        base = aliasing.root(operand)
        owned = base.op == "call_function" and last[base] == rank[node]
        if owned or not aliasing.tensor(operand).is_contiguous():
            continue
        with step.graph.inserting_before(node):
            copy = step.graph.call_function(aten.clone.default, (operand,))
        copy.meta = {"val": torch.empty_like(aliasing.tensor(operand))}
        for reader in (node, *(u for u in node.users if u.target is wait)):
            reader.replace_input_with(operand, copy)


def _write_into(node: fx.Node, index: int, found: InPlace) -> None:
    args = list(node.args)
    if found.out:
        node.kwargs = {**node.kwargs, found.out: args[index]}
    args[0], args[index] = args[index], args[0]
    node.target, node.args = found.form, tuple(args)


def _holds(taker: fx.Node, base: fx.Node, result: fx.Node) -> bool:
    """Return whether `taker`, whose storage is owned by `base`, can take the result."""
    before, after = aliasing.tensor(taker), aliasing.tensor(result)
    same = (
        before.shape == after.shape
        and before.dtype == after.dtype
        and before.stride() == after.stride()
    )
    return base.op == "call_function" and same and aliasing.fills_storage(before)


def add_products_in_place(step: StepGraph) -> None:
    """Let a matrix product that is only accumulated add to its accumulator directly."""
    for node in step.graph.find_nodes(op="call_function", target=aten.add_.Tensor):
        accumulator, product = node.args
        if (
            not isinstance(accumulator, fx.Node)
            or not isinstance(product, fx.Node)
            or accumulator.op != "placeholder"
        ):
            continue
        if product.target is not aten.mm.default or len(product.users) > 1:
            continue
        addend, total = aliasing.tensor(product), aliasing.tensor(accumulator)
        if addend.dtype in SUMMED and addend.dtype == total.dtype and addend.shape == total.shape:
            node.target, node.args = aten.addmm_.default, (accumulator, *product.args)
            step.graph.erase_node(product)


def add_scaled_in_place(step: StepGraph) -> None:
    """Let a tensor of an earlier step that is only scaled and accumulated add to its accumulator directly."""
    for node in step.graph.find_nodes(op="call_function", target=aten.add_.Tensor):
        scaled = node.args[1]
        if not isinstance(scaled, fx.Node) or scaled.target is not aten.mul.Tensor:
            continue
        terms = (node.args[0], *scaled.args)
        accumulator, *factors = [n for n in terms if isinstance(n, fx.Node)]
        if len(factors) < 2 or len(scaled.users) > 1:
            continue
        if (
            accumulator.op == factors[0].op == "placeholder"
            and not aliasing.tensor(factors[1]).dim()
        ):
            node.target, node.args = aten.addcmul_.default, (accumulator, *factors)
            step.graph.erase_node(scaled)
