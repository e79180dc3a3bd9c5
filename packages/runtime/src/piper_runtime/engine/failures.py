"""Say where and why an instruction failed, and of an allocation that failed what the plan says is in memory then."""

from __future__ import annotations

import torch

from piper_ir.fold.memory import Usage, scan
from piper_ir.tools.units import size_text
from piper_runtime.rank.binding.rank import BoundInstr, Rank
from piper_runtime.rank.values.code import raised_in_step

_OF_THE_CPU = "DefaultCPUAllocator: can't allocate memory"
"""The words of a RuntimeError in place of which torch raises OutOfMemoryError on other devices."""


def place_of(rank: Rank, entry: BoundInstr) -> str:
    """Return the rank, step and instruction."""
    return f"rank {rank.rank}, step {rank.step}, instruction {entry.index} ({entry.name} on {entry.stream})"


def cause_of(rank: Rank, entry: BoundInstr, error: BaseException) -> str:
    """Return an exception of an instruction as text; an allocation's names the bytes that the plan says are held."""
    cause = raised_in_step(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _OF_THE_CPU in str(error):
        return f"{cause.rstrip(': .')}. {_planned(rank, entry.index)}"
    return cause


def _planned(rank: Rank, index: int) -> str:
    role = rank.role
    until = [usage for usage in scan(rank.plan, role) if usage.instr <= index]
    here = f"{_held(until[-1])} in this instruction, and " if until else ""
    peak_at = role.program[role.peak_at].name if role.peak_at >= 0 else "the beginning"
    return (
        f"The plan says that the rank holds at most {here}{size_text(role.peak_bytes)} in {peak_at}, its peak. If the "
        f"device has as much, other processes hold memory of it, or its allocator has too little in one piece"
    )


def _held(usage: Usage) -> str:
    parts = sorted(usage.bytes.items(), key=lambda part: (-part[1], part[0]))
    by_category = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in parts)
    return f"{size_text(usage.total)} ({by_category})"
