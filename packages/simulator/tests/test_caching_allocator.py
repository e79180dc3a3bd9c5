"""Torch's rules for blocks and segments, by hand and on random requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from piper_simulator.memory.caching_allocator import (
    MIN_BLOCK,
    CachedBlock,
    CachingAllocator,
    rounded,
    segment_size,
)
from tests.helpers.cases import each_case

KIB, MIB = 1 << 10, 1 << 20


@each_case(
    ("nbytes", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB),
    ],
)
def test_sizes(nbytes: int, block: int, segment: int) -> None:
    assert (rounded(nbytes), segment_size(rounded(nbytes))) == (block, segment)
    memory = CachingAllocator()
    found, made = memory.allocate(nbytes)
    assert (
        made is not None and made.size == memory.reserved == segment and found.requested == nbytes
    )
    # what is left of a large segment becomes a block only beyond 1 MiB
    split = segment - block >= MIN_BLOCK if block <= MIB else segment - block > MIB
    assert found.size == (block if split else segment)


def test_the_smallest_block_that_fits_is_taken_and_neighbours_join() -> None:
    memory = CachingAllocator()
    blocks = [memory.allocate(n * KIB)[0] for n in (8, 4, 16, 4, 64)]
    assert memory.reserved == 2 * MIB and blocks[1].address == blocks[0].address + 8 * KIB
    memory.free(blocks[0])
    memory.free(blocks[2])
    again, made = memory.allocate(8 * KIB)
    assert made is None and again.address == blocks[0].address, (
        "8 KiB fit exactly; the 16 stay whole"
    )
    memory.free(blocks[1])
    memory.free(again)
    memory.free(blocks[3])
    joined, _ = memory.allocate(32 * KIB)
    assert joined.address == blocks[0].address, "8, 4, 16 and 4 are one block now"
    large, made = memory.allocate(12 * MIB)
    assert made is not None and not large.small and memory.reserved == 14 * MIB


def walk(memory: CachingAllocator) -> list[CachedBlock]:
    out = []
    for first in memory.segments.values():
        block: CachedBlock | None = first
        while block is not None:
            assert block.after is None or (
                block.after.before is block and block.after.address == block.address + block.size
            )
            assert block.requested or block.after is None or block.after.requested, (
                "two free neighbours"
            )
            out.append(block)
            block = block.after
    return out


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40 * MIB)), max_size=40))
def test_blocks_tile_their_segments_and_none_is_given_twice(
    requests: list[tuple[bool, int]],
) -> None:
    memory, live = CachingAllocator(), list[CachedBlock]()
    for give_back, n in requests:
        if give_back and live:
            memory.free(live.pop(n % len(live)))
        else:
            live.append(memory.allocate(n)[0])
        found = walk(memory)
        assert sum(b.size for b in found) == memory.reserved
        assert sorted(b.address for b in found if b.requested) == sorted(b.address for b in live)
        assert all(b.size >= rounded(b.requested) for b in live)
    for block in live:
        memory.free(block)
    assert all(b is memory.segments[b.segment] for b in walk(memory)), (
        "each segment is one free block again"
    )
