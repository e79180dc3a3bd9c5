"""Find the arguments of a step that are views of values, for buckets whose states ranks share."""

from __future__ import annotations

from piper_ir.plan.plan import Category, Part
from piper_ir.program.ops import Compute
from piper_ir.program.program import Chunk
from piper_runtime.rank.binding.rank_state import RankState

BucketView = tuple[int, str, tuple[int, ...], tuple[int, ...], int]
"""The index of an argument, the value that it is a view of, and its size, stride and offset there."""


def shared_arguments(part: Part, chunk: Chunk, rank: RankState) -> list[BucketView]:
    """Return the arguments that are views of values which the part holds in place of states that ranks share."""
    if not part.held:
        return []
    assert isinstance(part.op, Compute)
    signature = chunk.steps[part.op.step]
    stands_for = {rank.stands_for[v]: v for v in part.held}
    read: list[tuple[Category, int]] = [
        ("gathered", int(p[2:])) if p.startswith("in") else ("gathered", -1)
        for p in signature.reads
    ]
    asked = [*read, *[("reduced", i) for i in signature.accumulates]]
    views: list[BucketView] = []
    for index, (category, i) in enumerate(asked):
        place = (
            rank.place_of.get(chunk.inputs[i].ref)
            if i >= 0 and chunk.inputs[i].kind == "param"
            else None
        )
        if place is not None and (value := stands_for.get((category, place.bucket))) is not None:
            views.append((index, value, place.size, place.stride, place.offset))
    return views
