"""Turn orders of actions into directives: partition, split, split_backward, place and one order per device."""

from __future__ import annotations

from collections.abc import Iterable

from piper_compiler.actions import Action, Orders
from piper_compiler.directives import (
    Boundaries,
    Directive,
    order,
    overlap,
    partition,
    place,
    split,
    split_backward,
)
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.select import Where, where


def scheduled(
    orders: Orders, *, microbatches: int, at: Boundaries = "even"
) -> tuple[Directive, ...]:
    """Return the directives that make device r of the axis pp run `orders[r]`.

    A stage is placed on the device of its actions: on two devices if that depends on the microbatch. Its backward is
    split for the microbatches that have an I.
    """
    actions = [a for slots in orders for slot in slots for a in slot]
    wrong = next((a for a in actions if not isinstance(a, Action)), None)
    if wrong is not None or not actions:
        raise DirectiveError(
            f"scheduled: {wrong!r} stands in the orders; slots of Action(stage, phase, mb) are needed"
        )
    stages = 1 + max(a.stage for a in actions)
    directives: list[Directive] = [
        partition(stages=stages, at=at),
        split(where(), microbatches=microbatches),
    ]
    directives += _splits(actions, stages, microbatches)
    for r, slots in enumerate(orders):
        homes: dict[int, list[int]] = {}
        for action in (a for slot in slots for a in slot if a.phase == "F"):
            homes.setdefault(action.stage, []).append(action.mb)
        directives += [
            place(_of(stage, sorted(homes[stage]), microbatches), on=dict(pp=r))
            for stage in sorted(homes)
        ]
    for slots in orders:
        items = [_one(slot[0]) if len(slot) == 1 else overlap(*map(_one, slot)) for slot in slots]
        if len(items) > 1 or (items and len(slots[0]) > 1):
            directives.append(order(*items, missing="skip"))  # frozen stages have no backward
    return tuple(directives)


def _one(action: Action) -> Where:
    return Where((("mb", action.mb), ("phase", action.phase), ("stage", action.stage)))


def _of(stage: int, microbatches: list[int], total: int) -> Where:
    return (
        where(stage=stage)
        if len(microbatches) == total
        else where(stage=stage, mb=tuple(microbatches))
    )


def _splits(actions: Iterable[Action], stages: int, microbatches: int) -> list[Directive]:
    """Return the split_backward directives: one for everything if all is split, else one per stage."""
    split_at: dict[int, list[int]] = {}
    for action in actions:
        if action.phase == "I":
            split_at.setdefault(action.stage, []).append(action.mb)
    if len(split_at) == stages and all(len(mbs) == microbatches for mbs in split_at.values()):
        return [split_backward(where())]
    return [
        split_backward(_of(stage, sorted(mbs), microbatches))
        for stage, mbs in sorted(split_at.items())
    ]
