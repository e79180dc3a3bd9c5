"""Describe schedules as data: the actions of each device, in order, before they become directives, a plan or a table.

An *action* is one phase of one stage for one microbatch. A *slot* is one entry of a device's order: one action, or the
members of an overlapped group, forward first. *Orders* hold the slots of each device in order, without idle time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ActionPhase = Literal["F", "B", "I", "W"]
"""The phases of an action; B is I followed by W. Each stage and microbatch has either one B, or one I and one W."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """Name one phase of one stage for one microbatch; the text of `Action(2, "F", 0)` is "2F0", as in torch's table."""

    stage: int
    phase: ActionPhase
    mb: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.mb}"


Slot = tuple[Action, ...]
Orders = Sequence[Sequence[Slot]]
