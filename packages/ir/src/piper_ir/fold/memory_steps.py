"""Yield the changes of a role's memory by name, in program order, and compute the memory use of a part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from piper_ir.fold.part_memory import PartLike, part_peak
from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import COMPUTE, Instr, Part, Plan, RolePlan
from piper_ir.program.ops import Compute

P = TypeVar("P", bound=PartLike[Any])
V = TypeVar("V")
"""A value by name, or by number in a table."""


@dataclass(frozen=True, slots=True)
class PartUse(Generic[P]):
    """Hold the memory use of a part: it allocates its writes, holds at most `beside` bytes more, and frees its frees.

    `beside` is negative if bytes of the inputs that die here were given back before.
    """

    part: P
    beside: int


@dataclass(frozen=True, slots=True)
class MemoryStep:
    """Hold an instruction of the stream "compute": it frees `early`, runs its parts, and then allocates `made`."""

    index: int
    instr: Instr
    uses: tuple[PartUse[Part], ...]

    @property
    def early(self) -> tuple[str, ...]:
        """Return the values that it frees before it runs."""
        return self.instr.frees_before

    @property
    def made(self) -> tuple[str, ...]:
        """Return the values that it allocates afterwards."""
        return self.instr.allocs_after


def steps(plan: Plan, role: RolePlan) -> Iterator[MemoryStep]:
    """Yield the changes of a role's memory, instruction by instruction."""
    uses = PartUses(plan)
    for index, instr in enumerate(role.program):
        if instr.stream == COMPUTE:
            yield MemoryStep(
                index, instr, tuple([uses.of(part, _sizes(plan, part)) for part in instr.parts])
            )


def _sizes(plan: Plan, part: PartLike[str]) -> dict[str, int]:
    return {v: bind(plan.kinds[v][0].nbytes, 0) for v in (*part.reads, *part.writes)}


class PartUses:
    """Compute the memory use of parts, once for each step of equal chunks in which the same inputs die."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._known: dict[tuple[int, ...], int] = {}
        self._equal: dict[tuple[object, ...], int] = {}
        self._steps: dict[int, tuple[Compute, int]] = {}

    def of(self, part: P, sizes: Mapping[Any, int]) -> PartUse[P]:
        """Return the memory use of a part, given the bytes of the values that it reads and writes."""
        return PartUse(part, self.most(part, sizes) - sum([sizes[v] for v in part.writes]))

    def most(self, part: PartLike[V], sizes: Mapping[V, int]) -> int:
        """Return the most bytes that a part holds above those before it, its writes included."""
        if not isinstance(part.op, Compute):
            return part_peak(self.plan, part, sizes)
        dying = [sizes[v] if v in part.frees else -1 for v in part.reads] if part.frees else ()
        key = self._step(part.op), *dying
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = part_peak(self.plan, part, sizes)
        return known

    def _step(self, op: Compute) -> int:
        """Return a number for the step of a chunk, which equal chunks share. Microbatches have one object for it."""
        _, number = self._steps.get(id(op), (op, -1))
        if number < 0:
            chunk = self.plan.chunk(op.variant)
            key = id(chunk.ports), id(chunk.steps[op.step]), *[i.kind for i in chunk.inputs]
            number = self._equal.setdefault(key, len(self._equal))
            self._steps[id(op)] = op, number
        return number
