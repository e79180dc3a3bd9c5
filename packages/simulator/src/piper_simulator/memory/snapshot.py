"""Write the memory of a role through a step in the format of `torch.cuda.memory._snapshot()`.

torch's memory visualiser draws it (pytorch.org/memory_viz; `python -m torch.cuda._memory_viz`). Sizes are the bytes
that are asked for, as torch records them; together they are at most the peak of the plan, at its fullest moment.
Addresses come from `CachingAllocator`. A block's frames name it: the value or state with its category, then the node
that makes it, with the index of its instruction as the line. Context and communicators are missing, since they are no
memory of the allocator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from piper_ir.fold.memory_owners import device_bytes
from piper_ir.fold.memory_steps import MemoryStep, PartUse, steps
from piper_ir.plan.plan import Part, Plan, RolePlan
from piper_simulator.memory.caching_allocator import CachedBlock, CachingAllocator

Snapshot = dict[str, Any]
"""A snapshot with `segments` at the end of the step, `device_traces` of the events on one device, and settings."""

Frames = list[dict[str, Any]]


def snapshot(plan: Plan, role: RolePlan, spans: Sequence[tuple[float, float]]) -> Snapshot:
    """Return the snapshot of a role.

    `spans` are start and end of each instruction of the role, in seconds. Values are allocated when their instruction
    starts and freed when it ends; states are there before.
    """
    log = _Log()
    for state in role.device_states:
        log.allocate(state.id, state.nbytes, state.category, "before the step", -1)
    for v in role.allocs_first:
        log.value(plan, v, "before the step", -1)
    for step in steps(plan, role):
        start, end = spans[step.index]
        _run(log, plan, step, round(start * 1e6), round(end * 1e6))
    return log.snapshot()


def _run(log: _Log, plan: Plan, step: MemoryStep, start: int, end: int) -> None:
    log.time_us = max(log.time_us, start)
    log.free(step.early)
    for use in step.uses:
        _run_part(log, plan, step, use)
    log.time_us = max(log.time_us, end)
    log.free(v for use in step.uses[-1:] for v in use.part.frees if v in log)
    for v in step.made:
        log.value(plan, v, step.instr.name, step.index)


def _run_part(log: _Log, plan: Plan, step: MemoryStep, use: PartUse[Part]) -> None:
    """Allocate the part's writes and, at its fullest moment, its temporaries, or free inputs that it gives back."""
    part, beside = use.part, use.beside
    for v in part.frees:
        if beside >= 0:
            break
        if v not in part.writes:
            log.free((v,))
            beside += plan.values[v].nbytes
    for v in part.writes:
        log.value(plan, v, part.node, step.index)
    if beside > 0:
        log.allocate("workspace", beside, "workspace", part.node, step.index)
        log.free(("workspace",))
    if use is not step.uses[-1]:
        log.free(v for v in part.frees if v in log)


class _Log:
    """Log the requests to the allocator, at `time_us`."""

    def __init__(self) -> None:
        self.time_us = 0
        self._allocator = CachingAllocator()
        self._live: dict[str, tuple[CachedBlock | None, Frames]] = {}
        self._events: list[dict[str, Any]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._live

    def value(self, plan: Plan, value: str, instr: str, index: int) -> None:
        value_kind = plan.values[value]
        nbytes = device_bytes(plan, (value,))[value]
        self.allocate(value, nbytes, value_kind.category, instr, index)

    def allocate(self, name: str, nbytes: int, category: str, instr: str, index: int) -> None:
        """Allocate bytes for a name, unless there are none."""
        frames = [
            {"filename": category, "line": 0, "name": name},
            {"filename": "plan", "line": max(index, 0), "name": instr},
        ]
        block: CachedBlock | None = None
        if nbytes:
            block, segment = self._allocator.allocate(nbytes)
            if segment is not None:
                self._event("segment_alloc", segment.address, segment.size, frames, category)
            self._event("alloc", block.address, nbytes, frames, category)
        self._live[name] = block, frames

    def free(self, names: Iterable[str]) -> None:
        for name in names:
            block, frames = self._live.pop(name)
            if block is not None:
                for action in ("free_requested", "free_completed"):
                    self._event(
                        action, block.address, block.requested, frames, frames[0]["filename"]
                    )
                self._allocator.free(block)

    def _event(self, action: str, address: int, size: int, frames: Frames, category: str) -> None:
        event = {
            "action": action,
            "addr": address,
            "size": size,
            "stream": 0,
            "time_us": self.time_us,
            "frames": frames,
        }
        self._events.append(event | {"category": category})

    def snapshot(self) -> Snapshot:
        live = {block.address: frames for block, frames in self._live.values() if block is not None}
        segments = [_segment(first, live) for first in self._allocator.segments.values()]
        return {
            "segments": segments,
            "device_traces": [self._events],
            "allocator_settings": {},
            "external_annotations": [],
        }


def _segment(first: CachedBlock, live: Mapping[int, Frames]) -> dict[str, Any]:
    blocks = []
    total = used = requested = 0
    block: CachedBlock | None = first
    while block is not None:
        state = "active_allocated" if block.requested else "inactive"
        frames = live.get(block.address, [])
        entry = {
            "address": block.address,
            "size": block.size,
            "requested_size": block.requested,
            "state": state,
        }
        blocks.append(entry | {"frames": frames})
        total, requested = total + block.size, requested + block.requested
        used += block.size if block.requested else 0
        block = block.after
    return {
        "device": 0,
        "address": first.address,
        "total_size": total,
        "allocated_size": used,
        "active_size": used,
        "requested_size": requested,
        "stream": 0,
        "segment_type": "small" if first.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
