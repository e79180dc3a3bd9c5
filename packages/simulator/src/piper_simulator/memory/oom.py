"""Judge a plan that does not fit: which devices run out of memory, when and by how much, and which tensors fill it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from piper_ir.fold.memory_owners import MemoryOwner
from piper_ir.tools import size_text, time_text

SHOWN = 3
"""The number of owners that a line of text names."""
KEPT = 10
"""The number of owners that a verdict holds."""


@dataclass(frozen=True)
class OomVerdict:
    """Say how the ranks of a role run out of memory.

    Attributes:
        ranks: they run the same program.
        needs: bytes on the device at the fullest moment.
        limit: bytes of the device.
        fullest: the instruction of that moment.
        at: the first instruction that needs more than there is; the program fails here.
        instr: its index; -1 when the initial bytes do not fit.
        time_s: seconds after the step begins; 0 when the initial bytes do not fit.
        beside: bytes there that are no tensors (`DeviceMemory`); below 0 where a software stack holds less than the
            plan's tensors.
    """

    ranks: tuple[int, ...]
    role: str
    needs: int
    limit: int
    fullest: str
    at: str
    instr: int
    time_s: float
    beside: int
    _find_owners: Callable[[], Sequence[MemoryOwner]] = field(repr=False, compare=False)

    @cached_property
    def owners(self) -> tuple[MemoryOwner, ...]:
        """Return the largest owners of memory at the fullest moment, in order."""
        return tuple(self._find_owners()[:KEPT])

    @property
    def over(self) -> int:
        return self.needs - self.limit

    @property
    def text(self) -> str:
        """Return the verdict in one line."""
        filled = [o.text for o in self.owners[:SHOWN]]
        if self.beside > 0:
            filled.append(f"{size_text(self.beside)} are no tensors")
        elif self.beside < 0:
            filled.append(f"less {size_text(-self.beside)} that the software stack does not hold")
        reason = too_much(self.ranks[0], self.role, self.needs, self.limit, self.fullest, filled)
        when = (
            "before the step begins"
            if self.instr < 0
            else f"{time_text(self.time_s)} into the step, in {self.at}"
        )
        return f"out of memory {when}: {reason}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers and text, for programs."""
        owners = [
            {"owner": o.name, "category": o.category, "microbatches": len(o.mbs), "bytes": o.bytes}
            for o in self.owners
        ]
        return {
            "ranks": list(self.ranks),
            "role": self.role,
            "needs_bytes": self.needs,
            "limit_bytes": self.limit,
            "over_bytes": self.over,
            "instruction": self.instr,
            "at": self.at,
            "time_s": self.time_s,
            "fullest": self.fullest,
            "owners": owners,
            "beside_bytes": self.beside,
        }


def too_much(
    rank: int, role: str, needs: int, limit: int, fullest: str, filled: Iterable[str]
) -> str:
    """Return why a plan does not fit, in the words of simulations and searches."""
    return (
        f"rank {rank} ({role}) needs {size_text(needs)}, {size_text(needs - limit)} more than the limit of "
        f"{size_text(limit)}; fullest in {fullest}: {', '.join(filled)}"
    )
