"""Find the storage of a graph node's value; memory, saved tensors and ownership are counted in storages.

A *view* shares the storage of one argument and costs nothing. Every other tensor node owns a storage, and so does each
output of an op with several outputs. In-place ops (only our own generated ones) return their first argument.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import fx

from piper_capture.torch_api._torch_joint import OpOverload

Fact = TypeVar("Fact")
UNANNOTATED_VIEWS = frozenset({torch.ops.aten._unsafe_view.default})
"""The ops whose schema does not say that the result shares the argument's storage."""


@cache
def aliased_argument(op: OpOverload) -> int | None:
    """Return the index of the argument whose storage the results of `op` share, or None."""
    if op in UNANNOTATED_VIEWS:
        return 0
    returned = {
        name
        for r in op._schema.returns
        if r.alias_info is not None
        for name in r.alias_info.before_set
    }
    for index, argument in enumerate(op._schema.arguments):
        alias = argument.alias_info
        # "a -> *" marks an op that returns a list of views (split, unbind); the list itself names no set.
        if alias is not None and (returned & set(alias.before_set) or "*" in alias.after_set):
            return index
    return None


def source(node: fx.Node) -> fx.Node | None:
    """Return the node whose storage `node` shares, or None if it owns its storage.

    Each result of an op with several results owns its storage, except in a view such as split.
    """
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        producer = node.args[0]
        assert isinstance(producer, fx.Node)
        return source(producer)
    if isinstance(node.target, OpOverload):
        index = aliased_argument(node.target)
        if index is not None:
            name = node.target._schema.arguments[
                index
            ].name  # the tensor that an op writes into may be a keyword argument
            argument = node.args[index] if index < len(node.args) else node.kwargs[name]
            assert isinstance(argument, fx.Node)
            return argument
    return None


def root(node: fx.Node) -> fx.Node:
    """Return the node that owns the storage of `node`."""
    while (base := source(node)) is not None:
        node = base
    return node


def show_whole_storages(graph: fx.Graph) -> None:
    """Give (fake) results, and views of them, storages of the size that kernels allocate, where fake kernels do not.

    col2im allocates the unfolded size, and embedding_bag on a CPU one bag more than there are indices; both shrink
    the result, whose storage keeps its size.
    """
    shown: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is torch.ops.aten.col2im.default:
            value, room = (
                tensor(node),
                max(tensor(node).numel(), tensor(node.all_input_nodes[0]).numel()),
            )
            node.meta["val"] = value.new_empty(room)[: value.numel()].view(value.shape)
        elif node.target is torch.ops.aten._embedding_bag.default:
            found, bags, *others = tensors(node)
            room = bags.numel() + (bags.numel() > 0)
            node.meta["val"] = (found, bags.new_empty(room)[: bags.numel()], *others)
        elif node.target is operator.getitem and node.args[0] in shown:
            node.meta["val"] = node.args[0].meta["val"][node.args[1]]
        elif shown and source(node) in shown:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)
        else:
            continue
        shown.add(node)


def is_view(node: fx.Node) -> bool:
    """Return whether a node shares the storage of one of its arguments."""
    return source(node) is not None


def tensor(node: fx.Node) -> torch.Tensor:
    """Return the (fake) tensor of a node with one result."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), f"{node} has no tensor value"
    return value


def tensors(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """Return all (fake) tensors that a node makes."""
    value = node.meta["val"]
    items = value if isinstance(value, list | tuple) else (value,)
    return tuple(v for v in items if isinstance(v, torch.Tensor))


def producer(node: fx.Node) -> fx.Node:
    """Return the op that makes the node's tensor: a getitem lives with its op."""
    first = node.args[0] if node.target is operator.getitem else node
    assert isinstance(first, fx.Node)
    return first


def asked(of_op: Callable[[Any, Any, Any, Any], Fact], node: fx.Node) -> Fact:
    """Return the value of a function of a node's op, (fake) arguments, (fake) results and keyword arguments."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return of_op(node.target, args, node.meta["val"], kwargs)


def storage_bytes(value: torch.Tensor) -> int:
    """Return the bytes of a tensor's whole storage, even if the tensor covers only a part of it."""
    return value.untyped_storage().nbytes()


def fills_storage(value: torch.Tensor) -> bool:
    """Return whether a tensor covers its whole storage without gaps or overlaps, in any order of dimensions."""
    return dense_order(value) is not None and value.numel() * value.element_size() == storage_bytes(
        value
    )


def dense_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """Return the permutation of the dimensions that makes `value` contiguous, or None if no permutation does."""
    if value.is_contiguous():
        return tuple(range(value.dim()))
    strides: tuple[int, ...] = value.stride()
    order = tuple(sorted(range(value.dim()), key=lambda d: (-strides[d], value.shape[d] == 1, d)))
    return order if value.permute(order).is_contiguous() else None
