"""Show the waits of each instruction of a plan, found when someone asks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import overload

from piper_compiler.passes.steps.draft import IssueStreams, WaitEdges


class LazyWaits:
    """Hold the waits of all instructions, found when someone asks."""

    def __init__(self, streams: IssueStreams, waits: WaitEdges) -> None:
        self._streams, self._waits = streams, waits

    @cached_property
    def needed(self) -> WaitEdges:
        """Return the instructions that each instruction must wait for."""
        return self._streams.needed(self._waits)

    @cached_property
    def by_instr(self) -> tuple[tuple[int, ...], ...]:
        """Return for each instruction the instructions that it waits for."""
        return self._streams.waits_of(self.needed)

    def of(self, a: int, b: int) -> RoleWaits:
        """Return the waits of the instructions of a role."""
        return RoleWaits(self, a, b)


class RoleWaits(Sequence[tuple[int, ...]]):
    """Show the waits of a role's instructions, counted from its first."""

    def __init__(self, waits: LazyWaits, first: int, end: int) -> None:
        self._waits, self._first, self._end = waits, first, end

    @cached_property
    def _own(self) -> list[tuple[int, ...]]:
        first = self._first
        return [
            tuple([j - first for j in js]) if js else js
            for js in self._waits.by_instr[first : self._end]
        ]

    def __len__(self) -> int:
        return self._end - self._first

    @overload
    def __getitem__(self, i: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[tuple[int, ...]]: ...
    def __getitem__(self, i: int | slice) -> tuple[int, ...] | Sequence[tuple[int, ...]]:
        return self._own[i]
