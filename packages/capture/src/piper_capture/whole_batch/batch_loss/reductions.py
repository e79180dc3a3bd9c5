"""Name the calls of a captured graph as torch does, and say how the reductions among them depend on the rows."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, fx

from piper_capture.torch_api._torch import OpOverload

Base = Literal["sum", "mean", "constant"]
"""The way in which values of microbatches become the value of the whole batch.

They are added up, their mean is taken, or the value is the same in each microbatch.
"""

IGNORED = -100
"""The target that torch's losses of classes ignore unless another is given."""
SUMS = frozenset({"sum", "nansum", "count_nonzero"})
MEANS = frozenset({"mean"})
PRODUCTS = frozenset({"matmul", "mm", "mv", "dot", "vdot", "inner", "einsum", "tensordot"})
"""The calls that add up products; if the result has no rows, over the rows."""
ADDED = frozenset({"index_add", "scatter_add", "scatter_reduce"})
"""The calls that add rows at the places that an index gives."""
ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
CLASSES = frozenset({"cross_entropy", "nll_loss", "nll_loss_nd", "nll_loss2d"})
"""The losses whose mean divides by the number of targets that are not ignored, or by the sum of their weights."""
LOSSES = frozenset(
    {
        *(
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "huber_loss",
            "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
        ),
        *(
            "kl_div",
            "poisson_nll_loss",
            "gaussian_nll_loss",
            "soft_margin_loss",
            "margin_ranking_loss",
        ),
        *(
            "hinge_embedding_loss",
            "multi_margin_loss",
            "multilabel_margin_loss",
            "multilabel_soft_margin_loss",
        ),
        *(
            "cosine_embedding_loss",
            "triplet_margin_loss",
            "triplet_margin_with_distance_loss",
            "ctc_loss",
        ),
    }
)
"""The losses whose mean divides by a number of elements or rows that is the same for equal numbers of rows."""
PORTABLE_NAME = "piper::cross_entropy"
"""The name of Piper's own cross-entropy in its schema."""
_POSITIONS: Mapping[str, tuple[str, ...]] = {
    PORTABLE_NAME: ("input", "target", "reduction", "ignore_index"),
    "nll_loss_nd": ("input", "target", "weight", "reduction", "ignore_index"),
}
_SAME_NAME = {
    **dict.fromkeys(("truediv", "true_divide", "divide", "itruediv"), "div"),
    **dict.fromkeys(("multiply", "imul"), "mul"),
    **dict.fromkeys(("iadd",), "add"),
    **dict.fromkeys(("subtract", "isub"), "sub"),
    "negative": "neg",
}


def call_name(node: fx.Node) -> str:
    """Return the name of a call without regard to its form: "div" for `x / y`, `x.div_(y)` and torch.true_divide."""
    target = node.target
    if isinstance(target, OpOverload):
        name = target._schema.name.partition("::")[2]
    else:
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return _SAME_NAME.get(name, name)


def is_portable_loss(node: fx.Node) -> bool:
    """Return whether a node is Piper's own cross-entropy, whose first result is the loss."""
    return isinstance(node.target, OpOverload) and node.target._schema.name == PORTABLE_NAME


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a loss by name; raise TypeError if they do not fit torch's function."""
    names = _POSITIONS.get(PORTABLE_NAME if is_portable_loss(node) else call_name(node))
    if names is not None:
        return {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    function = getattr(F, call_name(node))
    return dict(inspect.signature(function).bind(*node.args, **node.kwargs).arguments)


def reduced(node: fx.Node) -> Base | Literal["classes", "rows"] | None:
    """Return how a reduction over rows adds up over microbatches; None if it is not known.

    "classes" is a mean over targets that are not ignored, and "rows" a loss of each row by itself.
    """
    name = call_name(node)
    if name in SUMS | PRODUCTS:
        return "sum"
    if name in MEANS:
        return "mean"
    if name in ADDED:
        return "sum" if _adds_to_zeros(node) else None
    return _reduced_by_loss(node, name)


def _reduced_by_loss(node: fx.Node, name: str) -> Base | Literal["classes", "rows"] | None:
    """Return how a loss of torch adds up, as `reduced` does; None for other functions."""
    if name not in CLASSES | LOSSES or (
        not is_portable_loss(node) and not hasattr(F, name) and name not in _POSITIONS
    ):
        return None
    try:
        by_name = arguments(node)
    except TypeError:
        return None
    if by_name.get("size_average") is not None or by_name.get("reduce") is not None:
        return None
    reduction = by_name.get("reduction", "mean")
    if reduction in ("sum", "none"):
        return "sum" if reduction == "sum" else "rows"
    if reduction not in ("mean", "batchmean"):
        return None
    of_classes = name in CLASSES and not _example(by_name["target"]).is_floating_point()
    return "classes" if of_classes else "mean"


def _adds_to_zeros(node: fx.Node) -> bool:
    target = node.args[0]
    how = node.kwargs.get("reduce", node.args[4] if len(node.args) > 4 else "sum")
    return isinstance(target, fx.Node) and call_name(target) in ZEROS and how == "sum"


def _example(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["example_value"]
    return value
