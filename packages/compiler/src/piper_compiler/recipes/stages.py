"""Hold the common parts of recipes: checks of numbers, placements, and orders cut to fewer microbatches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from piper_compiler.actions import Action, ActionPhase, Orders, Slot
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.limits import MOST_NODES

FACTORS = ("pp", "chunks", "microbatches")
"""The arguments of a recipe whose product is the number of forwards in its order."""


def check_numbers(name: str, **given: int) -> None:
    """Raise DirectiveError unless every number is an integer of at least 1 and the order is not too long.

    `name` is the recipe. Its order has a forward for each stage and microbatch.
    """
    if any(type(n) is not int or n < 1 for n in given.values()):
        shown = ", ".join(f"{key}={n!r}" for key, n in given.items())
        raise DirectiveError(
            f"{name}({shown}): {'both' if len(given) == 2 else 'all'} must be integers of at least 1"
        )
    forwards = prod(given.get(factor, 1) for factor in FACTORS)
    if forwards > MOST_NODES:
        shown = ", ".join(f"{key}={n!r}" for key, n in given.items())
        most = max(1, MOST_NODES * given.get("microbatches", 1) // forwards)
        raise DirectiveError(
            f"{name}({shown}): its order would have {forwards} forwards; at most {MOST_NODES} are accepted, that "
            f"is {most} microbatches with these stages"
        )


def looped_stage(pp: int, device: int, chunk: int) -> int:
    """Return the stage that is chunk `chunk` of a device, in loop placement."""
    return chunk * pp + device


def v_stage(pp: int, device: int, chunk: int) -> int:
    """Return the stage that is chunk 0 or 1 of a device in the V placement, down the devices and back up."""
    return 2 * pp - 1 - device if chunk else device


def slot(stage: int, phase: ActionPhase, mb: int) -> Slot:
    """Return a slot of one action."""
    return (Action(stage, phase, mb),)


def round_robin(
    pp: int, chunks: int, device: int, groups: int, size: int, back: bool = False
) -> Iterator[tuple[int, int]]:
    """Yield (stage, microbatch) of the forwards of a device in loop placement, or with `back` of the backwards.

    Each group of `size` microbatches goes through all chunks before the next group; backwards begin at the last chunk.
    """
    for group in range(groups):
        for chunk in reversed(range(chunks)) if back else range(chunks):
            for k in range(size):
                yield looped_stage(pp, device, chunk), group * size + k


def first_microbatches(orders: Iterable[Iterable[Slot]], microbatches: int) -> Orders:
    """Return the orders without the microbatches from `microbatches` on.

    Microbatches do not depend on each other, so the shorter orders have no deadlock if the longer ones have none.
    """
    return [
        [left for slot in slots if (left := tuple([a for a in slot if a.mb < microbatches]))]
        for slots in orders
    ]
