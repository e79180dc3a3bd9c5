"""Make the same strategy for another number of devices: its recipe with other numbers, or fewer replicas."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from piper_compiler import Strategy, partition, replicate, shard, split
from piper_compiler.directives import Directive
from piper_compiler.recipes import RECIPES, Recipe
from piper_ir.ground.errors import PiperError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where

RESIZED = ("pp", "dp", "rep")
"""The axes of a mesh that may get another size: on all others the strategy itself depends."""


@dataclass(frozen=True)
class UsedRecipe:
    """Say which directives of a strategy a recipe has made, and with which further arguments."""

    recipe: Recipe
    begin: int
    end: int
    more: dict[str, Any]

    def made(self, pp: int, microbatches: int) -> tuple[Directive, ...]:
        """Return the directives of the recipe for other numbers; for one stage only the microbatches are left."""
        if pp == 1:
            return (split(where(), microbatches=microbatches),)
        return Strategy(
            Mesh(pp=pp), self.recipe.make(pp=pp, microbatches=microbatches, **self.more)
        ).directives


def used_recipe(strategy: Strategy) -> UsedRecipe | None:
    """Return the pipeline recipe whose directives a strategy has, all one behind the other; None without one.

    A recipe is recognised with its default arguments, but for pp, microbatches, chunks and the boundaries of stages.
    """
    pp, directives = strategy.mesh.size("pp"), strategy.directives
    cuts = [d for d in directives if isinstance(d, split)]
    parts = [d for d in directives if isinstance(d, partition)]
    if len(cuts) != 1 or pp == 1:
        return None
    arguments: dict[str, Any] = {"pp": pp, "microbatches": cuts[0].microbatches}
    more = {"chunks": parts[0].stages // pp, "at": parts[0].at} if parts else {}
    for recipe in RECIPES.values():
        taken = {n: v for n, v in more.items() if n in inspect.signature(recipe.make).parameters}
        try:
            pattern = Strategy(strategy.mesh, recipe.make(**arguments, **taken)).directives
        except (PiperError, TypeError):  # these numbers are not legal for it, or it needs others
            continue
        for begin in range(len(directives) - len(pattern) + 1):
            if directives[begin : begin + len(pattern)] == pattern:
                kept = {
                    n: v for n, v in taken.items() if not isinstance(v, tuple)
                }  # boundaries are for so many stages
                return UsedRecipe(recipe, begin, begin + len(pattern), kept)
    return None


def on_devices(strategy: Strategy, world: int, global_batch: int) -> Iterator[Strategy]:
    """Yield the same strategy on all meshes of exactly `world` ranks, as far as it can be written; not all are legal.

    If its recipe is known, the number of microbatches changes with the mesh: first so that a microbatch has as many
    rows as before, then others close to that.
    """
    known = used_recipe(strategy)
    fixed = {axis: size for axis, size in strategy.mesh.sizes if axis not in RESIZED}
    for sizes in _sizes(
        strategy.mesh, world // _product(fixed.values()), world % _product(fixed.values()) == 0
    ):
        if sizes["pp"] != strategy.mesh.size("pp") and known is None:
            continue
        mesh = Mesh((*fixed.items(), *sizes.items()), strategy.mesh.order)
        for microbatches in _microbatches(strategy, mesh, global_batch):
            try:
                yield Strategy(mesh, _resized(strategy, known, mesh, microbatches))
            except PiperError:  # the recipe does not take these numbers
                continue


def _sizes(mesh: Mesh, world: int, divides: bool) -> Iterator[dict[str, int]]:
    """Yield the sizes of the axes that may change; the order of a mesh's replicas and stages stays."""
    for pp in range(1, world + 1):
        for rep in range(1, world // pp + 1):
            if divides and world % (pp * rep) == 0 and (rep == 1 or mesh.size("rep") > 1):
                yield {"pp": pp, "rep": rep, "dp": world // (pp * rep)}


def _product(sizes: Any) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _microbatches(strategy: Strategy, mesh: Mesh, global_batch: int) -> list[int]:
    """Return numbers of microbatches that divide the rows of a replica, the one with as many rows as before first."""
    before = next((d.microbatches for d in strategy.directives if isinstance(d, split)), 1)
    rows = global_batch // (strategy.replicas * before)
    mine, left = divmod(global_batch, Strategy(mesh, strategy.directives).replicas)
    if left:
        return []
    wanted = mine / max(rows, 1)
    fitting = [m for m in range(1, mine + 1) if mine % m == 0 and wanted / 2 <= m <= 2 * wanted]
    return sorted(fitting, key=lambda m: (abs(m - wanted), m))


def _resized(
    strategy: Strategy, known: UsedRecipe | None, mesh: Mesh, microbatches: int
) -> list[Directive]:
    """Return the directives for a mesh; drop replications over axes of one device, and directives that need them."""
    if known is not None:
        recipe_directives = known.made(mesh.size("pp"), microbatches)
        directives = [
            *strategy.directives[: known.begin],
            *recipe_directives,
            *strategy.directives[known.end :],
        ]
    else:
        directives = [
            replace(d, microbatches=microbatches) if isinstance(d, split) else d
            for d in strategy.directives
        ]
    return [d for d in directives if not _alone(d, mesh)]


def _alone(item: Directive, mesh: Mesh) -> bool:
    """Return whether a directive lets one device replicate something, or share experts."""
    if isinstance(item, shard) and item.experts:
        return not mesh.along(item.joined)
    return isinstance(item, replicate) and all(mesh.size(axis) == 1 for axis in item.over)
