"""Find how the gradients of a joint graph depend on its incoming gradients: linearly, or otherwise.

Every backward formula of torch is linear, and the rest of Piper relies on it: the gradient of a batch is the sum of its
microbatches' gradients, at any scale. A user's backward may be nonlinear: it may add an auxiliary gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import torch
from torch import fx

from piper_capture.graphs.stepgraph import Joint
from piper_capture.torch_api._torch_joint import OpOverload
from piper_capture.values import aliasing

AuxiliaryForm = Literal["", "sum", "mean"]
"""The kind of auxiliary gradients for which the loss needs another form: "" for none."""


class Linearity(IntEnum):
    """Name how a value depends on the incoming gradients; a greater number is worse.

    A zero is a constant that adds nothing. `AFFINE` is linear plus a constant, `UNKNOWN` the result of an operator
    without a known formula, and `OTHER` everything else.
    """

    ZERO = 0
    CONSTANT = 1
    LINEAR = 2
    AFFINE = 3
    UNKNOWN = 4
    OTHER = 5


Kind = Literal["linear", "sum", "mean", "unknown"]


@dataclass(frozen=True)
class Auxiliary:
    """Name a backward that is not linear in the incoming gradient.

    Attributes:
        line: the user's line that calls it.
        kind: whether the whole batch's auxiliary gradient is the sum or the mean over its parts; "unknown" if neither.
        trained: whether any number of parts trains the same as the whole batch.
    """

    line: str
    kind: Kind
    trained: bool = False


ZERO, CONSTANT, LINEAR, AFFINE, UNKNOWN, OTHER = Linearity

ZEROS = frozenset({"zeros", "zeros_like", "new_zeros", "zero"})
_ADDED = (
    "add sub rsub neg cat stack sum mean cumsum clone _to_copy to flip roll repeat constant_pad_nd tril triu trace "
    "real imag conj _conj conj_physical view_as_real view_as_complex complex _fft_r2c _fft_c2r _fft_c2c "
    "slice_scatter select_scatter diagonal_scatter as_strided_scatter scatter_add index_add scatter scatter_reduce "
    "index_copy index_put _unsafe_index_put masked_scatter masked_fill where gather index index_select "
    "_unsafe_index take embedding lift_fresh_copy diag_embed unfold_backward im2col col2im pixel_shuffle "
    "pixel_unshuffle new_empty_strided block_diag"
)
_PRODUCTS = "mul mm bmm mv dot vdot outer ger matmul _grouped_mm grouped_mm _trilinear linalg_cross kron convolution"
_SUMMED = "addmm baddbmm addmv addr addbmm addcmul"
ADDED = frozenset(_ADDED.split())
"""The operators whose result is linear in all their floating-point tensors together."""
PRODUCTS = frozenset(_PRODUCTS.split())
"""The operators that are linear in each of their tensors separately."""
SUMMED_PRODUCTS = frozenset(_SUMMED.split())
"""The operators that add such a product to their first tensor."""
FIRST = {"div": 0, "true_divide": 0, "linalg_solve_triangular": 1}
"""The operators that are linear in one of their tensors only, with the index of this argument."""
GRADIENTS = ("grad", "tangent", "dy", "dout")
"""The prefixes of argument names for gradients in backward kernels, which are linear in them."""
OURS = ("aten", "prims", "piper")


def dependence(joint: Joint) -> tuple[Linearity, fx.Node | None]:
    """Return the dependence of a chunk's gradients on its incoming gradients, and the first node that causes it."""
    kinds: dict[fx.Node, Linearity] = dict.fromkeys(joint.tangents.values(), LINEAR)
    for node in joint.graph.nodes:
        if node.op == "call_function":
            kinds[node] = _made(node, kinds)
        else:
            kinds.setdefault(node, CONSTANT)
    worst, culprit = LINEAR, None
    for gradient in joint.grads.values():
        kind = AFFINE if kinds[gradient] == CONSTANT else kinds[gradient]
        if kind > worst:
            worst, culprit = kind, _origin(gradient, kinds)
    return worst, culprit


def _origin(node: fx.Node, kinds: Mapping[fx.Node, Linearity]) -> fx.Node:
    """Return the first node before a gradient that has the same dependence."""
    while before := next(
        (n for n in node.all_input_nodes if kinds[n] == kinds[node] != CONSTANT), None
    ):
        node = before
    return node


def _made(node: fx.Node, kinds: Mapping[fx.Node, Linearity]) -> Linearity:
    input_kinds = [kinds[n] for n in node.all_input_nodes]
    if node.target is operator.getitem:
        return input_kinds[0]
    if not isinstance(node.target, OpOverload):
        return (
            max(input_kinds, default=CONSTANT)
            if max(input_kinds, default=CONSTANT) <= CONSTANT
            else UNKNOWN
        )
    name = node.target._schema.name.partition("::")[2]
    if max(input_kinds, default=CONSTANT) <= CONSTANT:
        return ZERO if _is_zero(node, name, input_kinds) else CONSTANT
    if node.target.namespace not in OURS:
        return UNKNOWN
    return _of_op(node, name, kinds)


def _is_zero(node: fx.Node, name: str, given: Iterable[Linearity]) -> bool:
    fills = name in ("full", "full_like", "new_full", "scalar_tensor")
    if name in ZEROS or (
        fills and next((a for a in reversed(node.args) if isinstance(a, int | float)), 1) == 0
    ):
        return True
    keeps = aliasing.is_view(node) or name in ("clone", "_to_copy")
    return keeps and all(kind == ZERO for kind in given)


def _of_op(node: fx.Node, name: str, kinds: Mapping[fx.Node, Linearity]) -> Linearity:
    """Return the dependence of an operator with at least one argument that depends on incoming gradients."""
    target: Any = node.target
    named = dict(zip((a.name for a in target._schema.arguments), node.args)) | node.kwargs
    varying = {
        key for key, value in named.items() if any(kinds[n] > CONSTANT for n in _nodes(value))
    }
    if all(key.startswith(GRADIENTS) for key in varying) or target.namespace == "piper":
        return _added(kind for key in varying for kind in _kinds(named[key], kinds))
    if aliasing.is_view(node):
        return max(kinds[n] for n in node.all_input_nodes)
    if name in ADDED:
        return _sum(named, varying, kinds)
    return _of_name(name, named, varying, kinds)


def _of_name(
    name: str, named: Mapping[str, Any], varying: set[str], kinds: Mapping[fx.Node, Linearity]
) -> Linearity:
    """Return the dependence of a copy or of an operator that multiplies, from its arguments by name."""
    if name == "copy":
        return max(_kinds(named["src"], kinds), default=CONSTANT)
    first, *rest = ([*_kinds(value, kinds), CONSTANT][0] for value in named.values())
    if name in PRODUCTS:
        return _product((first, *rest))
    if name in SUMMED_PRODUCTS:
        return _added((first, _product(rest)))
    if name in FIRST:
        own = list(named)[FIRST[name]]
        return max(_kinds(named[own], kinds)) if varying == {own} else OTHER
    return OTHER


def _sum(
    named: Mapping[str, Any], varying: set[str], kinds: Mapping[fx.Node, Linearity]
) -> Linearity:
    """Return the dependence of a sum, copy or selection; one on conditions, indexes or masks is not linear."""
    chosen = {"condition", "index", "indices", "mask", "dim"}
    if varying & chosen:
        return OTHER
    terms = [
        kind for key, value in named.items() if key not in chosen for kind in _kinds(value, kinds)
    ]
    numbers = [
        named.get(key)
        for key in ("other", "value", "self")
        if isinstance(named.get(key), int | float)
    ]
    if "reduce" in named and named["reduce"] not in ("sum", "mean"):
        return OTHER
    return _added([*terms, *(CONSTANT for number in numbers if number != 0)])


def _added(terms: Iterable[Linearity]) -> Linearity:
    kinds = {kind for kind in terms if kind != ZERO}
    return AFFINE if kinds == {CONSTANT, LINEAR} else max(kinds, default=ZERO)


def _product(factors: Iterable[Linearity]) -> Linearity:
    kinds = list(factors)
    varying = [kind for kind in kinds if kind > CONSTANT]
    if ZERO in kinds:
        return ZERO
    return OTHER if len(varying) > 1 else max(varying, default=CONSTANT)


def _nodes(value: Any) -> list[fx.Node]:
    nodes: list[fx.Node] = []

    def note(node: fx.Node) -> fx.Node:
        nodes.append(node)
        return node

    fx.node.map_arg(value, note)
    return nodes


def _kinds(value: Any, kinds: Mapping[fx.Node, Linearity]) -> list[Linearity]:
    """Return the dependences of an argument's floating-point tensors; integer tensors carry no gradient."""
    return [kinds[n] for n in _nodes(value) if _floating(n)]


def _floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()
