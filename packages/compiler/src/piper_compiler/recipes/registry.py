"""Keep the list of recipes; each says its source and its formula, and may leave its sizes to the strategy.

A recipe in a user's file has the same standing as those here:

    @recipe(source="our report 7", formula="(m + p - 1)(F + B)", peak="m on every device", use="...")
    def mine(*, pp: int, microbatches: int) -> tuple[Directive, ...]: ...

It can be called without `pp`, and with `rows` in place of `microbatches`: see `SizedRecipe`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, Protocol, cast, overload

from piper_compiler.directives.base import Directive, call_site
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.mesh import Mesh

P = ParamSpec("P")
Directives = tuple[Directive, ...]


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


class SizedRecipe(Protocol[P]):
    """Describe a recipe that leaves its sizes to the strategy where it is asked to.

    Without `pp` it takes the mesh's. With `rows`, the rows of a microbatch on one rank, in place of `microbatches` the
    strategy finds the microbatches from its `global_batch` and its replicas. Then a call returns one `SizedLater`,
    which `Strategy` replaces by the directives.
    """

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Directives: ...
    @overload
    def __call__(self, *, rows: int, **more: Any) -> Directives: ...
    @overload
    def __call__(self, *, microbatches: int, **more: Any) -> Directives: ...


@dataclass(frozen=True)
class SizedLater:
    """Hold a call of a recipe until its strategy knows the sizes.

    Attributes:
        make: the recipe.
        arguments: those given, without `rows`.
        rows: rows of a microbatch on one rank; None if the microbatches are given.
        site: where the user wrote it.
    """

    make: Callable[..., Directives]
    arguments: Mapping[str, Any]
    rows: int | None
    site: str

    def directives(self, mesh: Mesh, replicas: int, global_batch: int | None) -> Directives:
        """Return the directives of the recipe on a mesh, for a step of `global_batch` rows on all replicas.

        Raises DirectiveError if the rows of a replica are not known, or do not divide into microbatches.
        """
        more: dict[str, Any] = {}
        if "pp" in inspect.signature(self.make).parameters and "pp" not in self.arguments:
            more["pp"] = mesh.size("pp")
        if self.rows is not None:
            more["microbatches"] = self._microbatches(self.rows, replicas, global_batch)
        return self.make(**self.arguments, **more)

    def _microbatches(self, rows: int, replicas: int, global_batch: int | None) -> int:
        name = f"{self.make.__name__}(rows={rows!r})" + (f" at {self.site}" if self.site else "")
        if type(rows) is not int or rows < 1:
            raise DirectiveError(f"{name}: an integer of at least 1 is needed")
        if global_batch is None:
            raise DirectiveError(
                f"{name}: the number of microbatches follows from the rows of a step; give them as "
                f"Strategy(..., global_batch=job.global_batch), or microbatches= in place of rows="
            )
        microbatches, rest = divmod(global_batch, replicas * rows)
        if rest or not microbatches:
            fitting = [n for n in range(1, rows + 1) if global_batch % (replicas * n) == 0]
            way_out = (
                f"use rows={fitting[-1]}"
                if fitting
                else f"use a step of a multiple of {replicas} rows"
            )
            raise DirectiveError(
                f"{name}: {global_batch} rows of a step do not divide into {replicas} replicas of microbatches of "
                f"{rows} rows; {way_out}"
            )
        return microbatches


def sized(make: Callable[P, Directives]) -> SizedRecipe[P]:
    """Return a recipe that also takes `rows`, and may leave out `pp`; see `SizedRecipe`."""
    parameters = inspect.signature(make).parameters

    @wraps(make)
    def call(*args: Any, rows: int | None = None, **arguments: Any) -> Any:
        if rows is not None and "microbatches" in arguments:
            raise DirectiveError(
                f"{make.__name__}(rows={rows!r}, microbatches={arguments['microbatches']!r}): give one of both; rows "
                f"are those of a microbatch on one rank"
            )
        try:
            bound = inspect.signature(make).bind_partial(*args, **arguments).arguments
        except TypeError as problem:
            takes = ", ".join((*parameters, "rows"))
            raise DirectiveError(f"{make.__name__}: {problem}; it takes {takes}") from None
        asked = parameters.get("microbatches")
        needed = asked is not None and asked.default is inspect.Parameter.empty
        if rows is None and needed and "microbatches" not in bound:
            raise DirectiveError(
                f"{make.__name__}: microbatches=, or rows= of a microbatch on one rank, is needed"
            )
        if rows is None and ("pp" in bound or "pp" not in parameters):
            return make(*args, **arguments)
        return (SizedLater(make, bound, rows, call_site()),)

    return cast(SizedRecipe[P], call)


def recipe(
    *, source: str, formula: str, peak: str, use: str, rule: str = ""
) -> Callable[[Callable[P, Directives]], SizedRecipe[P]]:
    """Register a function as a recipe under its own name; raise DirectiveError when another module has that name.

    The decorated function also takes `rows`, and may leave out `pp` (see `SizedRecipe`).
    """

    def register(make: Callable[P, Directives]) -> SizedRecipe[P]:
        known = RECIPES.get(make.__name__)
        if known is not None and known.make.__module__ != make.__module__:
            raise DirectiveError(
                f"two recipes are called {make.__name__}: in {known.make.__module__} and "
                f"{make.__module__}; rename one"
            )
        RECIPES[make.__name__] = Recipe(make.__name__, make, source, formula, peak, use, rule)
        return sized(make)

    return register
