"""Say where and why an instruction failed, and of an allocation that failed the bytes that the plan has there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from piper_ir.fold.memory import Usage, scan
from piper_ir.ground.errors import ExecutionError
from piper_ir.plan.plan import Plan, RolePlan
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
    if not _of_an_allocation(error):
        return raised_in_step(error)
    until = [usage for usage in scan(rank.plan, rank.role) if usage.instr <= entry.index]
    here = f"at most {_held(until[-1])} in this instruction" if until else ""
    return _planned(rank.role, error, here)


@contextmanager
def state_allocated(plan: Plan, rank: int) -> Iterator[None]:
    """Make a rank's parameters, buffers and optimizer state inside of the block.

    Raises ExecutionError with the bytes that the plan has for them, if an allocation fails.
    """
    try:
        yield
    except Exception as error:
        if not _of_an_allocation(error):
            raise
        role = plan.role_of(rank)
        states: Counter[str] = Counter()
        for state in role.device_states:
            states[state.category] += state.nbytes
        held = _held(Usage(0, states.total(), dict(states)))
        cause = _planned(role, error, f"{held} before its first step")
        raise ExecutionError(f"rank {rank}, while it loads its state: {cause}") from error


def _of_an_allocation(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _OF_THE_CPU in str(error)


def _planned(role: RolePlan, error: BaseException, here: str) -> str:
    """Return an allocation's error with the bytes that a role holds at its place and at its peak."""
    peak_at = role.program[role.peak_at].name if role.peak_at >= 0 else "the beginning"
    return (
        f"{raised_in_step(error).rstrip(': .')}. The plan says that the rank holds {here}{', and ' if here else ''}"
        f"{size_text(role.peak_bytes)} in {peak_at}, its peak. If the device has as much, other processes hold memory "
        f"of it, or its allocator has too little in one piece"
    )


def _held(usage: Usage) -> str:
    parts = sorted(usage.bytes.items(), key=lambda part: (-part[1], part[0]))
    by_category = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in parts)
    return f"{size_text(usage.total)} ({by_category})"
