"""Define the recipes of float8 training: how each operand of the three products of a linear layer is quantised.

    forward      y [M, N]  = x [M, K] w [N, K]^T
    gradient     dx [M, K] = dy [M, N] w [N, K]
    of a weight  dw [N, K] = dy [M, N]^T x [M, K]

A block of an operand has one scale: the largest number of the float8 dtype over the block's largest magnitude.
Sources: torchao 0.18, float8/config.py (`Float8LinearConfig.from_recipe_name`) and float8/float8_linear.py; Transformer
Engine at d0067d0d, common/recipe/__init__.py (`Float8BlockScaling`, `MXFP8BlockScaling`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALL = 0
"""The size of a block that has all elements of a dimension."""


@dataclass(frozen=True, slots=True)
class QuantisedOperand:
    """Say how an operand of a product is quantised.

    Attributes:
        kept: the elements of a block along the dimension that the result has, too; ALL for the whole dimension.
        summed: the elements of a block along the dimension over which the product sums; likewise.
        dtype: the float8 dtype.
    """

    kept: int
    summed: int
    dtype: torch.dtype = E4M3

    @property
    def alike(self) -> bool:
        """Return whether the transposed operand has the same blocks, so that two products can read one tensor."""
        return self.kept == self.summed


QuantisedOperands = tuple[QuantisedOperand, QuantisedOperand]


@dataclass(frozen=True, slots=True)
class Float8Recipe:
    """Say how the operands of the three products are quantised.

    Attributes:
        forward: of the input and the weight.
        dgrad: of the gradient of the output and the weight.
        wgrad: of the gradient of the output and the input; None for a product in the dtype of the layer.
        power: whether scales are rounded down to powers of two.
        delayed: whether scales come from the magnitudes of earlier steps, so that no pass over a tensor finds them.
    """

    forward: QuantisedOperands
    dgrad: QuantisedOperands
    wgrad: QuantisedOperands | None
    power: bool
    delayed: bool = False

    @property
    def blocks(self) -> tuple[int, int]:
        """Return the numbers that must divide the features of a layer, and its tokens."""
        both = (*self.forward, *self.dgrad)
        features = max(o.summed for o in both), max(o.kept for o in both), 1
        tokens = [o.summed for o in self.wgrad or ()]
        return max(features), max([*tokens, 1])


_TENSOR, _GRADIENT, _ROW = (
    QuantisedOperand(ALL, ALL),
    QuantisedOperand(ALL, ALL, E5M2),
    QuantisedOperand(1, ALL),
)
_LINE, _SQUARE, _GROUP = (
    QuantisedOperand(1, 128),
    QuantisedOperand(128, 128),
    QuantisedOperand(1, 32),
)
RECIPES: Mapping[str, Float8Recipe] = {
    "tensorwise": Float8Recipe(
        (_TENSOR, _TENSOR), (_GRADIENT, _TENSOR), (_GRADIENT, _TENSOR), False
    ),
    "delayed": Float8Recipe(
        (_TENSOR, _TENSOR), (_GRADIENT, _TENSOR), (_GRADIENT, _TENSOR), False, delayed=True
    ),
    "rowwise": Float8Recipe((_ROW, _ROW), (_ROW, _ROW), (_ROW, _ROW), True),
    "rowwise_with_gw_hp": Float8Recipe((_ROW, _ROW), (_ROW, _TENSOR), None, True),
    "blockwise": Float8Recipe((_LINE, _SQUARE), (_LINE, _SQUARE), (_LINE, _LINE), True),
    "mxfp8": Float8Recipe((_GROUP, _GROUP), (_GROUP, _GROUP), (_GROUP, _GROUP), True),
}
"""The recipes by name, "tensorwise" and "rowwise" as torchao calls them.

The others come from Transformer Engine (`DelayedScaling` is its default), whose current scaling is "tensorwise". The
scales of "mxfp8" have no other form here than those of "blockwise", though on devices they have 8 bits.
"""
SAVED = ("input", "float8")


@dataclass(frozen=True)
class Float8:
    """Say which linear layers multiply in float8, and how.

    Attributes:
        recipe: the name of a recipe in `RECIPES`.
        modules: patterns of the names of linear layers that do, as of files: "layers.*" means all below `layers`.
        keep: patterns of the names of other ones, which stay in their dtype though `modules` matches them.
        saved: the tensor that waits for the gradient of a weight: the "input" of the layer as it is, as with torchao,
            or quantised ("float8"), as with Transformer Engine.
    """

    recipe: str = "tensorwise"
    modules: tuple[str, ...] = ("*",)
    keep: tuple[str, ...] = ()
    saved: str = "input"

    @property
    def cannot_run(self) -> str:
        """Return why a plan with this is predicted only, with the way out; "" if it can be executed, too."""
        if not RECIPES[self.recipe].delayed:
            return ""
        return (
            f"Float8(recipe={self.recipe!r}): predicted only, since scales of earlier steps are a state that no plan "
            "has yet; to train, take 'tensorwise', whose scales come from the tensor itself, at the price of a pass over it"
        )

    @property
    def problem(self) -> str:
        """Return why the fields are not accepted; "" if they are."""
        if self.recipe not in RECIPES:
            return f"recipe={self.recipe!r}: one of {', '.join(RECIPES)} is needed"
        for name in ("modules", "keep"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(p, str) for p in value):
                return f"{name}={value!r}: a tuple of patterns is needed, such as ('layers.*',)"
        return "" if self.saved in SAVED else f"saved={self.saved!r}: 'input' or 'float8' is needed"
