"""Say what a directive decides before it is compiled: lower bounds of a plan's time and memory follow from that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from piper_compiler.directives.base import Directive
from piper_ir.select import Where


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


def decided(item: Directive) -> Decided | None:
    """Return what a directive decides, None when it does not say so.

    A class that applies otherwise than the one whose `decided` it inherits decides something else.
    """
    if not isinstance(item, Deciding):
        return None
    says = next(kind for kind in type(item).__mro__ if "decided" in vars(kind) or "apply" in vars(kind))
    return item.decided() if "decided" in vars(says) else None
