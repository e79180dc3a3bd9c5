"""Name a recipe or a directive with its arguments, so that a strategy can be written for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from piper_compiler import offload, recipes, recompute, tile_loss

DIRECTIVES = {"recompute": recompute, "offload": offload, "tile_loss": tile_loss}
"""The directives that stand beside recipes."""


@dataclass(frozen=True)
class RecipeCall:
    """Name a recipe of `piper.recipes`, or a directive, and its arguments."""

    name: str
    how: Mapping[str, Any]

    @cached_property
    def directives(self) -> Sequence[Any]:
        """Return the recipe's directives."""
        if self.name in DIRECTIVES:
            return (DIRECTIVES[self.name](**self.how),)
        directives: Sequence[Any] = getattr(recipes, self.name)(**self.how)
        return directives

    def text(self) -> str:
        """Return the call as people write it, in a tuple of directives."""
        arguments = ", ".join(
            f"{value}" if name == "selection" else f"{name}={value!r}"
            for name, value in self.how.items()
        )
        return f"{'piper.' if self.name in DIRECTIVES else '*recipes.'}{self.name}({arguments})"


@lru_cache(maxsize=256)
def schedule_call(name: str, **how: int) -> RecipeCall:
    """Return the call of a schedule, whose directives are made once for all strategies that have it."""
    return RecipeCall(name, how)
