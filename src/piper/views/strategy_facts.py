"""Describe a strategy in a few words: its mesh, its schedule, the rows of a microbatch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper_compiler import Strategy, recipes
from piper_compiler.directives import (
    offload,
    order,
    recompute,
    replicate,
    split,
    split_backward,
)


@dataclass(frozen=True)
class StrategyFacts:
    """Describe a strategy in a few words.

    Attributes:
        mesh: Its axes and their sizes.
        schedule: Stages, microbatches and further facts.
        rows: Rows of a microbatch; None if the batch is not known, or does not divide.
    """

    mesh: str
    schedule: str
    rows: int | None


def facts_of(strategy: Strategy, global_batch: int | None) -> StrategyFacts:
    """Return the facts of a strategy's directives, without a user's own directives."""
    stages = recipes.stages_of(strategy.directives) or 1
    microbatches = next((d.microbatches for d in strategy.directives if isinstance(d, split)), 1)
    words = [
        f"{stages} stages" if stages > 1 else "1 stage",
        f"{microbatches} microbatches" if microbatches > 1 else "whole batch",
    ]
    if any(isinstance(d, split_backward) for d in strategy.directives):
        words.append("backward split")
    if not any(isinstance(d, order) for d in strategy.directives) and stages > 1:
        words.append("default order")
    words += _sharing(strategy) + _recomputing(strategy)
    if any(isinstance(d, offload) for d in strategy.directives):
        words.append("offload")
    parts = microbatches * strategy.replicas
    rows = global_batch // parts if global_batch and not global_batch % parts else None
    sizes = ", ".join(f"{axis}={strategy.mesh.size(axis)}" for axis in reversed(strategy.mesh.axes))
    return StrategyFacts(sizes or "1 device", ", ".join(words), rows)


def _sharing(strategy: Strategy) -> list[str]:
    """Return which states ranks share, as the level of ZeRO, with the axes if these are not all."""
    levels: dict[str, None] = {}
    for item in strategy.directives:
        if isinstance(item, replicate) and (shards := item.shards).optim:
            level = sum(map(bool, (shards.params, shards.grads, shards.optim)))
            levels[
                f"zero={level}"
                + (
                    ""
                    if set(shards.optim) == set(item.over)
                    else f" over {', '.join(shards.optim)}"
                )
            ] = None
    return list(levels)


def _recomputing(strategy: Strategy) -> list[str]:
    """Return the policies of recomputation."""
    policies = sorted(
        {
            name
            for d in strategy.directives
            if isinstance(d, recompute)
            for name in replace(d, group=1).policies()
        }
    )
    return [f"recompute {', '.join(policies)}"] if policies else []
