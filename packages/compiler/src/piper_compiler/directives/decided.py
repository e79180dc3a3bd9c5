"""Read a directive's decisions before it is compiled: lower bounds of a plan's time and memory follow from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from piper_compiler.directives.base import Directive
from piper_ir.ground.select import Where


class Ordered(Protocol):
    """Describe an order: its selections, and (first, number) of each run of selections that forms an overlap."""

    @property
    def selections(self) -> tuple[Where, ...]: ...

    @property
    def overlaps(self) -> tuple[tuple[int, int], ...]: ...


@dataclass(frozen=True)
class Decided:
    """Hold the decisions of a directive.

    Attributes:
        single: the directive for a single microbatch, whose graph says where every chunk runs; None for a directive
            that says nothing about that.
        microbatches: the number of microbatches if it splits the batch; else None.
        order: the order of microbatches on devices if it sets one; else None.
        away: whether tensors that wait for a backward may leave the device, so that no bound of memory counts them.
    """

    single: Directive | None = None
    microbatches: int | None = None
    order: Ordered | None = None
    away: bool = False


@runtime_checkable
class Deciding(Protocol):
    """Describe a directive that tells its decisions; None: they cannot be told before it is compiled."""

    def decided(self) -> Decided | None: ...


@runtime_checkable
class Simplifying(Protocol):
    """Describe a directive that can say the same without arguments that have no effect; None: it does nothing."""

    def simplest(self) -> Directive | None: ...


def decided(item: Directive) -> Decided | None:
    """Return the decisions of a directive, None when it does not tell them."""
    return item.decided() if isinstance(item, Deciding) and _is_own(item, "decided") else None


def simplest(items: Iterable[Directive]) -> tuple[Directive, ...]:
    """Return directives that make the same plans, without arguments that have no effect.

    Strategies that differ in such arguments only are one for a search.
    """
    each = (
        item.simplest() if isinstance(item, Simplifying) and _is_own(item, "simplest") else item
        for item in items
    )
    return tuple([item for item in each if item is not None])


def _is_own(item: Directive, method: str) -> bool:
    """Return whether a method speaks of the directive's own `apply`.

    It does not if a class overrides `apply` and inherits the method.
    """
    return method in vars(
        next(kind for kind in type(item).__mro__ if method in vars(kind) or "apply" in vars(kind))
    )
