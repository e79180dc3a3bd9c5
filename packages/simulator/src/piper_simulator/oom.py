"""The verdict on a plan that does not fit into the memory of its devices: where, when, by how much, and what fills it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from piper_ir.memory_owners import Owner
from piper_ir.tools import size_text, time_text

SHOWN = 3
"""Owners that a line of text names."""
KEPT = 10
"""Owners that a verdict holds."""


@dataclass(frozen=True, slots=True)
class Oom:
    """`ranks` run the same program. `needs`: bytes on the device at the fullest moment, in instruction `fullest`; `limit`: what
    the device has. The program fails at `at`, in instruction `instr`, the first that needs more, `time_s` seconds after the step
    begins; -1 and 0.0 when what is there from the start does not fit. `owners`: at the fullest moment, largest first;
    `beside`: bytes there that are no tensors (`DeviceMemory`)."""

    ranks: tuple[int, ...]
    role: str
    needs: int
    limit: int
    fullest: str
    at: str
    instr: int
    time_s: float
    owners: tuple[Owner, ...]
    beside: int

    @property
    def over(self) -> int:
        return self.needs - self.limit

    @property
    def text(self) -> str:
        """In one line."""
        filled = [o.text for o in self.owners[:SHOWN]]
        if self.beside:
            filled.append(f"{size_text(self.beside)} are no tensors")
        reason = too_much(self.ranks[0], self.role, self.needs, self.limit, self.fullest, filled)
        when = "before the step begins" if self.instr < 0 else f"{time_text(self.time_s)} into the step, in {self.at}"
        return f"out of memory {when}: {reason}"

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        owners = [{"owner": o.name, "category": o.category, "microbatches": len(o.mbs), "bytes": o.bytes} for o in self.owners]
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


def too_much(rank: int, role: str, needs: int, limit: int, fullest: str, filled: Iterable[str]) -> str:
    """Why a plan does not fit, as simulations and searches say it."""
    return (
        f"rank {rank} ({role}) needs {size_text(needs)}, {size_text(needs - limit)} more than the limit of {size_text(limit)}; "
        f"fullest in {fullest}: {', '.join(filled)}"
    )


def first_of(verdicts: Sequence[Oom]) -> Oom | None:
    """The one that happens first."""
    return min(verdicts, key=lambda v: (v.time_s, v.ranks[0]), default=None)
