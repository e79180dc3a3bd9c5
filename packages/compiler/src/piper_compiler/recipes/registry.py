"""Keep the list of recipes; each says its source and its formula.

A recipe in a user's file has the same standing as those here:

    @recipe(source="our report 7", formula="(m + p - 1)(F + B)", peak="m on every device", use="...")
    def mine(*, pp: int, microbatches: int) -> tuple[Directive, ...]: ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from piper_ir.ground.errors import DirectiveError

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hold a function that returns a tuple of directives, with the known facts about its schedule.

    The texts use p devices, m microbatches, v chunks per device and the times F, I, W, B = I + W, O of one chunk.

    Attributes:
        source: the publication of the schedule.
        formula: bubble or makespan.
        peak: activation units on device r.
        use: when to use it.
        rule: which (pp, microbatches, chunks) are legal.
    """

    name: str
    make: Callable[..., Any]
    source: str
    formula: str
    peak: str
    use: str
    rule: str = ""


RECIPES: dict[str, Recipe] = {}
"""The pipeline schedules by name."""


def recipe(*, source: str, formula: str, peak: str, use: str, rule: str = "") -> Callable[[F], F]:
    """Register a function as a recipe under its own name; raise DirectiveError when another module has that name."""

    def register(make: F) -> F:
        known = RECIPES.get(make.__name__)
        if known is not None and known.make.__module__ != make.__module__:
            raise DirectiveError(
                f"two recipes are called {make.__name__}: in {known.make.__module__} and "
                f"{make.__module__}; rename one"
            )
        RECIPES[make.__name__] = Recipe(make.__name__, make, source, formula, peak, use, rule)
        return make

    return register
