"""Flatten and compare the arguments of calls of nested regions, for the reuse of traces (`_torch_reuse`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch._dynamo.variables import TupleVariable
from torch._dynamo.variables.invoke_subgraph import InputFingerprint, InputTag, classify_vt
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class _Leaf:
    tag: Any
    variable: Any


class _NotPlain(Exception):
    """Report an argument that is no leaf and no tuple of leaves."""


def quickly(flatten: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of Dynamo's `build_fingerprint_with_pytree` that is quick for leaves and tuples of leaves.

    Dynamo traces the code of pytree for each call, which takes longer than everything else about a call that reuses a
    trace. Other arguments are left to `flatten`.
    """

    def fingerprint(tx: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            plain = [*map(_plain, args)], {name: _plain(value) for name, value in kwargs.items()}
        except _NotPlain:
            return flatten(tx, args, kwargs)
        leaves, structure = pytree.tree_flatten(plain)
        return InputFingerprint(
            [(leaf.tag, leaf.variable) for leaf in leaves],
            [getattr(leaf.variable, "source", None) for leaf in leaves],
            treespec=structure,
        )

    return fingerprint


def _plain(variable: Any) -> Any:
    """Return a leaf, or a tuple of these."""
    variable = variable.realize()
    if type(variable) is TupleVariable:
        return tuple(map(_plain, variable.items))
    tag = classify_vt(variable)
    if tag is None:
        raise _NotPlain
    return _Leaf(tag, variable)


def properties_of(fingerprint: Any) -> tuple[Any, ...]:
    """Return the properties of a call's arguments that no guard checks; a trace fits only calls with equal ones."""
    nodes: dict[fx.Node, int] = {}
    properties = [_argument(tag, vt, nodes) for tag, vt in fingerprint.flat_vts]
    return (
        fingerprint.treespec,
        fingerprint.has_unknown,
        tuple(s is not None for s in fingerprint.arg_sources),
        *properties,
    )


def _argument(tag: Any, vt: Any, nodes: dict[fx.Node, int]) -> tuple[Any, ...]:
    if tag is InputTag.MODULE:
        return (tag,)
    if tag is InputTag.CONSTANT:
        return tag, type(vt.value), vt.value, repr(vt.value)
    node = vt.as_proxy().node
    same = nodes.setdefault(node, len(nodes))
    if tag is InputTag.SYMNODE:
        return tag, same, type(vt.sym_num), _size(vt.sym_num)
    return tag, same, vt.python_type(), tensor_facts(node.meta["example_value"])


def tensor_facts(tensor: Tensor) -> tuple[Any, ...]:
    sizes = (tuple(map(_size, tensor.shape)), tuple(map(_size, tensor.stride())))
    return type(tensor), *sizes, tensor.dtype, tensor.device, tensor.requires_grad


def _size(size: Any) -> Any:
    """Return a size, or the expression of a symbolic one: comparing symbolic sizes themselves would add guards."""
    return size.node.expr if hasattr(size, "node") else size
