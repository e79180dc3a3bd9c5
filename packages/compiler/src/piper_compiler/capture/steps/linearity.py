"""Say how the gradients that a joint graph makes depend on those that come in: linearly, or otherwise.

Every formula of torch's is linear, and the rest of Piper builds on that: a batch in parts gives the sum of the parts'
gradients, whatever they are scaled by. A backward that a user wrote need not be: it may add a gradient of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import torch
from torch import fx

from piper_compiler.capture.graphs.stepgraph import Joint
from piper_compiler.capture.torch_api._torch_joint import OpOverload
from piper_compiler.capture.values import aliasing

AuxiliaryForm = Literal["", "sum", "mean"]
"""The kind of the auxiliary gradients that a model adds, beside which its loss needs another form: "" for none."""


class Linearity(IntEnum):
    """Say how a value depends on the gradients that come in; of two, the greater one is the worse.

    A zero is a constant that adds nothing. `AFFINE` is linear with a constant added, `UNKNOWN` an operator of which
    nothing is known, and `OTHER` everything else.
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
    """Name a backward that is not linear in the gradient that comes in.

    Attributes:
        line: the user's line that calls it.
        kind: what the whole batch gives beside its parts; "unknown" where that cannot be told.
        trained: whether any number of parts trains what the whole batch trains.
    """

    line: str
    kind: Kind
    trained: bool = False


ZERO, CONSTANT, LINEAR, AFFINE, UNKNOWN, OTHER = Linearity

ZEROS = frozenset({"zeros", "zeros_like", "new_zeros", "zero"})
_ADDED = (
    "add sub rsub neg cat stack sum mean cumsum clone _to_copy to flip roll repeat constant_pad_nd "
    "tril triu trace "
    "real imag "
    "conj _conj conj_physical view_as_real view_as_complex complex _fft_r2c _fft_c2r _fft_c2c "
    "slice_scatter "
    "select_scatter "
    "diagonal_scatter as_strided_scatter scatter_add index_add scatter scatter_reduce index_copy "
    "index_put "
    "_unsafe_index_put "
    "masked_scatter masked_fill where gather index index_select _unsafe_index take embedding "
    "lift_fresh_copy "
    "diag_embed "
    "unfold_backward im2col col2im pixel_shuffle pixel_unshuffle new_empty_strided block_diag"
)
_PRODUCTS = (
    "mul mm bmm mv dot vdot outer ger matmul _grouped_mm grouped_mm _trilinear linalg_cross kron "
    "convolution"
)
_SUMMED = "addmm baddbmm addmv addr addbmm addcmul"
ADDED = frozenset(_ADDED.split())
"""The operations whose result is linear in all their floating-point tensors together."""
PRODUCTS = frozenset(_PRODUCTS.split())
"""The operations that are linear in each of their tensors."""
SUMMED_PRODUCTS = frozenset(_SUMMED.split())
"""The operations that add such a product to their first tensor."""
FIRST = {"div": 0, "true_divide": 0, "linalg_solve_triangular": 1}
"""The operations that are linear in one of their tensors, and which it is."""
GRADIENTS = ("grad", "tangent", "dy", "dout")
"""The beginnings of the names by which backward kernels take a gradient; they are linear in it."""
OURS = ("aten", "prims", "piper")


def dependence(joint: Joint) -> tuple[Linearity, fx.Node | None]:
    """Return how the gradients that a chunk makes depend on those it gets, and the first node that makes it so."""
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
    """Return the first node behind a gradient that is as bad as it is."""
    while before := next(
        (n for n in node.all_input_nodes if kinds[n] == kinds[node] != CONSTANT), None
    ):
        node = before
    return node


def _made(node: fx.Node, kinds: Mapping[fx.Node, Linearity]) -> Linearity:
    given = [kinds[n] for n in node.all_input_nodes]
    if node.target is operator.getitem:
        return given[0]
    if not isinstance(node.target, OpOverload):
        return max(given, default=CONSTANT) if max(given, default=CONSTANT) <= CONSTANT else UNKNOWN
    name = node.target._schema.name.partition("::")[2]
    if max(given, default=CONSTANT) <= CONSTANT:
        return ZERO if _is_zero(node, name, given) else CONSTANT
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
    """Return the dependence of an operation of which at least one tensor depends on gradients that come in."""
    target: Any = node.target
    named = dict(zip((a.name for a in target._schema.arguments), node.args)) | node.kwargs
    varying = {
        key for key, value in named.items() if any(kinds[n] > CONSTANT for n in _nodes(value))
    }
    if all(key.startswith(GRADIENTS) for key in varying) or target.namespace == "piper":
        return _added(kind for key in varying for kind in _kinds(named[key], kinds))
    if aliasing.is_view(node):
        return max(kinds[n] for n in node.all_input_nodes)
    if name == "copy":
        return max(_kinds(named["src"], kinds), default=CONSTANT)
    if name in ADDED:
        return _sum(node, named, varying, kinds)
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
    node: fx.Node, named: Mapping[str, Any], varying: set[str], kinds: Mapping[fx.Node, Linearity]
) -> Linearity:
    """Return the dependence of a sum, a copy or a choice between tensors: not of conditions, indexes and masks."""
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
    given = list(factors)
    varying = [kind for kind in given if kind > CONSTANT]
    if ZERO in given:
        return ZERO
    return OTHER if len(varying) > 1 else max(varying, default=CONSTANT)


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []

    def note(node: fx.Node) -> fx.Node:
        found.append(node)
        return node

    fx.node.map_arg(value, note)
    return found


def _kinds(value: Any, kinds: Mapping[fx.Node, Linearity]) -> list[Linearity]:
    """Return the dependence of the floating-point tensors of an argument; integers are never zero gradients."""
    return [kinds[n] for n in _nodes(value) if _floating(n)]


def _floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()
