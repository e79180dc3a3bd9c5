"""Compute the memory that one part of an instruction holds while it runs; every figure of memory uses this rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from piper_ir.plan.plan import Plan, is_state
from piper_ir.program.ops import Compute, Op, Update
from piper_ir.program.program import Chunk

V = TypeVar("V")
Co = TypeVar("Co", covariant=True)


class PartLike(Protocol[Co]):
    """Describe the fields of a part that memory depends on; its values may be names or numbers."""

    @property
    def op(self) -> Op: ...
    @property
    def reads(self) -> tuple[Co, ...]: ...
    @property
    def writes(self) -> tuple[Co, ...]: ...
    @property
    def frees(self) -> tuple[Co, ...]: ...
    @property
    def held(self) -> tuple[Co, ...]: ...


def part_peak(plan: Plan, part: PartLike[V], nbytes: Mapping[V, int]) -> int:
    """Return the most bytes that a part holds while it runs, above those alive before it.

    These are its writes and temporaries, less the dying inputs that it frees early, so they can be fewer than the bytes
    of its writes. `nbytes` has the bytes of each value.
    """
    writes = sum(nbytes[v] for v in part.writes)
    if not isinstance(part.op, Compute):
        return writes + (part.op.workspace if isinstance(part.op, Update) else 0)
    chunk = plan.chunk(part.op.variant)
    sig = chunk.steps[part.op.step]
    if not sig.liveness.consumed and sig.liveness.segments == (
        (),
    ):  # nothing known (synthetic): no temporaries
        return writes
    ports = value_ports(chunk, part)
    dying = {
        v: i
        for i, v in sorted(
            ports.items(),
            key=lambda p: (
                sig.liveness.consumed.index(p[0]) if p[0] in sig.liveness.consumed else -1
            ),
        )
    }
    return sig.liveness.peak({dying[v]: nbytes[v] for v in part.frees if v in dying}, plan.device)


def value_ports(chunk: Chunk, part: PartLike[V]) -> dict[int, V]:
    """Return the ids of the values that a part reads, by their index in the signature's reads.

    A part lists its values in the order of the signature's ports, without the ports that are parameters or buffers.
    """
    assert isinstance(part.op, Compute)
    values = iter(part.reads)
    return {
        i: next(values)
        for i, port in enumerate(chunk.steps[part.op.step].reads)
        if not is_state(chunk, port)
    }
