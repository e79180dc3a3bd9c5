"""Make schedules with several chunks per device, placed in loops: interleaved 1F1B and looped breadth-first."""

from __future__ import annotations

from piper_compiler.actions import Orders, Slot
from piper_compiler.directives import Boundaries, Directive
from piper_compiler.recipes.registry import recipe
from piper_compiler.recipes.scheduled import scheduled
from piper_compiler.recipes.stages import (
    check_numbers,
    first_microbatches,
    looped_stage,
    round_robin,
    slot,
)
from piper_ir.ground.errors import DirectiveError


@recipe(
    source="Narayanan et al. 2021, arXiv 2104.04473",
    formula="bubble (p - 1)(F + B), which is 1/v of that of 1F1B on the same model; m a multiple of g",
    peak="min(v m, 2(p - 1 - r) + (v - 1) g + 1)",
    use="few microbatches per device and a fast network: a smaller bubble for v times the communication",
    rule="any pp, microbatches, chunks >= 1; group >= pp",
)
def interleaved(
    *,
    pp: int,
    microbatches: int,
    chunks: int = 2,
    group: int | None = None,
    at: Boundaries = "even",
) -> tuple[Directive, ...]:
    """Run 1F1B over `chunks` chunks per device, stage s on device s mod pp.

    `group` microbatches (default: pp) go through a chunk before the next chunk's turn. Source: Narayanan et al. 2021,
    arXiv 2104.04473.

    Bubble (p - 1)(F + B) in times of one chunk, for any F, I, W; peak on device r: min(v m, 2(p - 1 - r) + (v - 1)g +
    1) activations of a chunk. Both hold if m is a multiple of g; otherwise the last group is not full, and the
    bubble is larger but not the peak. Raises DirectiveError for a group of fewer than pp microbatches: its next chunk
    would wait.
    """
    size = pp if group is None else group
    check_numbers("interleaved", pp=pp, microbatches=microbatches, chunks=chunks, group=size)
    if size < pp:
        raise DirectiveError(
            f"interleaved(pp={pp}, group={group}): with a group smaller than pp the first device would be idle "
            f"until the last one is done with the group; use group={pp} or more"
        )
    return scheduled(
        interleaved_orders(pp, microbatches, chunks, size), microbatches=microbatches, at=at
    )


def interleaved_orders(pp: int, microbatches: int, chunks: int, group: int) -> Orders:
    """Return the orders of interleaved 1F1B.

    Device r starts with 2(p - 1 - r) + (v - 1)g forwards; then one forward, one backward.
    """
    groups = -(-microbatches // group)
    orders: list[list[Slot]] = []
    for r in range(pp):
        forward = [slot(s, "F", i) for s, i in round_robin(pp, chunks, r, groups, group)]
        backward = [
            slot(s, "B", i) for s, i in round_robin(pp, chunks, r, groups, group, back=True)
        ]
        warm = min(2 * (pp - 1 - r) + (chunks - 1) * group, len(forward))
        steady = [taken for pair in zip(forward[warm:], backward, strict=False) for taken in pair]
        orders.append([*forward[:warm], *steady, *backward[len(forward) - warm :]])
    return first_microbatches(orders, microbatches)


@recipe(
    source="Lamy-Poirier 2023, arXiv 2211.05953",
    formula="bubble (p - 1)(F + B), as interleaved; m >= p",
    peak="v m",
    use="few microbatches: each chunk's parameters are used once per phase, so that its reductions overlap best",
    rule="any pp, microbatches, chunks >= 1",
)
def looped_bfs(
    *, pp: int, microbatches: int, chunks: int = 2, at: Boundaries = "even"
) -> tuple[Directive, ...]:
    """Run breadth first over `chunks` chunks per device, stage s on device s mod pp.

    All microbatches go through a chunk, then all through the next; backward likewise from the last chunk. Source:
    Lamy-Poirier 2023, arXiv 2211.05953.

    Bubble (p - 1)(F + B) in times of one chunk, for any F, I, W and m >= p; peak on every device: v m activations of a
    chunk. With one chunk it is GPipe. Any pp, microbatches and chunks.
    """
    check_numbers("looped_bfs", pp=pp, microbatches=microbatches, chunks=chunks)
    return scheduled(looped_bfs_orders(pp, microbatches, chunks), microbatches=microbatches, at=at)


def looped_bfs_orders(pp: int, microbatches: int, chunks: int) -> Orders:
    """Return the orders of looped BFS: all forwards, chunk by chunk; then all backwards, from the last chunk."""
    orders: list[list[Slot]] = []
    for r in range(pp):
        stages = [looped_stage(pp, r, chunk) for chunk in range(chunks)]
        slots = [slot(s, "F", i) for s in stages for i in range(microbatches)]
        orders.append(
            [*slots, *(slot(s, "B", i) for s in reversed(stages) for i in range(microbatches))]
        )
    return orders
