"""Say what a directive decides before it is compiled: lower bounds of a plan's time and memory follow from that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from piper_compiler.directives.base import Directive
from piper_ir.ground.select import Where


class Ordered(Protocol):
    """Describe an order: its selections, and (first, number) of those that form an overlap."""

    @property
    def selections(self) -> tuple[Where, ...]: ...

    @property
    def overlaps(self) -> tuple[tuple[int, int], ...]: ...


@dataclass(frozen=True)
class Decided:
    """Say what a directive decides.

    Attributes:
        single: the directive for a single microbatch, whose graph says where every chunk runs; None for a directive
            that says nothing about that.
        microbatches: into how many microbatches it splits the batch; None when it does not.
        order: the order in which it lets devices run their microbatches; None when it does not.
    """

    single: Directive | None = None
    microbatches: int | None = None
    order: Ordered | None = None


@runtime_checkable
class Deciding(Protocol):
    """Describe a directive that says what it decides; None: that cannot be told before it is compiled."""

    def decided(self) -> Decided | None: ...


@runtime_checkable
class Simplifying(Protocol):
    """Describe a directive that can say the same without arguments that have no effect; None: it does nothing."""

    def simplest(self) -> Directive | None: ...


def decided(item: Directive) -> Decided | None:
    """Return what a directive decides, None when it does not say so."""
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
    """Return whether a method speaks of what the directive does.

    A class that applies otherwise than the one whose method it inherits does something else.
    """
    return method in vars(
        next(kind for kind in type(item).__mro__ if method in vars(kind) or "apply" in vars(kind))
    )
