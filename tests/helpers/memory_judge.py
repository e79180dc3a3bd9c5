"""The judge of memory: in which points a plan says other bytes than a run of it held.

The measure is a counter that knows nothing of the plan: live storages, temporaries included, as torch's dispatcher
shows them. The plan's bytes are added up here once more, from what its instructions allocate and free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from piper_ir.fold import memory
from piper_ir.plan.plan import COMPUTE, HOST, Plan, RolePlan
from piper_runtime.engine.memory import MemoryRecord

WORKSPACE = 0.05
PEAK = 0.02


@dataclass(frozen=True)
class Planned:
    """Bytes of values before and after a compute instruction, and at its fullest moment."""

    instr: int
    before: int
    after: int
    fullest: int


def planned(plan: Plan, role: RolePlan) -> Iterator[Planned]:
    """The value bytes of a role, instruction by instruction."""
    fullest = {u.instr: u.total for u in memory.scan(plan, role)}
    states = sum(s.nbytes for s in role.states if not s.host)

    def size(values: tuple[str, ...]) -> int:
        return sum(v.nbytes for v in map(plan.values.__getitem__, values) if v.category != HOST)

    live = size(role.allocs_first)
    for index, instr in enumerate(role.program):
        if instr.stream == COMPUTE:
            before = live - size(instr.frees_before)
            live = (
                before
                + size(instr.allocs_after)
                + sum(size(p.writes) - size(p.frees) for p in instr.parts)
            )
            yield Planned(index, before, live, fullest[index] - states)


def lies(plan: Plan, records: Mapping[int, MemoryRecord]) -> list[str]:
    """Return the faults of a plan's memory, in words."""
    out = []
    for rank, record in records.items():
        role = plan.role_of(rank)
        states = sum(s.nbytes for s in role.states if not s.host)
        if record.states != states:
            out.append(f"rank {rank}: states hold {record.states} bytes, planned {states}")
        if record.host != role.host_peak_bytes:
            out.append(
                f"rank {rank}: {record.host} bytes on the host, planned {role.host_peak_bytes}"
            )
        measured = {p.instr: p for p in record.points if p.instr >= 0}
        for p in planned(plan, role):
            name = f"rank {rank}, instruction {p.instr} ({role.program[p.instr].name})"
            after, fullest = (
                measured[p.instr].after - record.states,
                measured[p.instr].within - record.states,
            )
            if after != p.after:
                out.append(f"{name}: {after} bytes of values are left, planned {p.after}")
            if abs(fullest - p.fullest) > WORKSPACE * (p.fullest - p.before):
                out.append(f"{name}: holds {fullest} bytes at most, planned {p.fullest}")
        if (
            abs(record.peak - role.peak_bytes) > PEAK * role.peak_bytes
            or record.peak_at != role.peak_at
        ):
            out.append(
                f"rank {rank}: peak {record.peak} at {record.peak_at}, planned {role.peak_bytes} at {role.peak_at}"
            )
    return out
