"""Give addresses as torch's CUDA caching allocator does: its rules for sizes, segments and splits, for one stream.

Rules and constants come from torch, c10/cuda/CUDACachingAllocator.cpp (kMinBlockSize, kSmallSize, kSmallBuffer,
kLargeBuffer, kMinLargeAlloc, kRoundLarge; get_allocation_size, should_split) with its default settings. Segments are
not given back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIN_BLOCK = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
OWN_SEGMENT = 10 << 20
ROUND_LARGE = 2 << 20
FIRST = 0x7F0000000000
"""The address of the first segment; segments do not touch, so blocks of two never merge."""


def rounded(nbytes: int) -> int:
    """Return the bytes of the block for a request."""
    return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)


def segment_size(block: int) -> int:
    """Return the bytes that are asked of the device for a block that fits nowhere."""
    if block <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if block < OWN_SEGMENT else -(-block // ROUND_LARGE) * ROUND_LARGE


@dataclass(slots=True)
class CachedBlock:
    """Describe a block of a segment.

    Attributes:
        address: where it begins.
        segment: where its segment begins.
        small: whether it is of the pool for small requests.
        requested: bytes that were asked for; 0 while it is free.
        before: its neighbour before it in the segment.
        after: its neighbour behind it in the segment.
    """

    address: int
    size: int
    segment: int
    small: bool
    requested: int = 0
    before: CachedBlock | None = None
    after: CachedBlock | None = None


class CachingAllocator:
    """Allocate blocks.

    Attributes:
        segments: address -> the first block of a segment.
        reserved: bytes of all segments.
    """

    def __init__(self) -> None:
        self.segments: dict[int, CachedBlock] = {}
        self.reserved = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: dict[int, CachedBlock] = {}
        self._next = FIRST

    def allocate(self, nbytes: int) -> tuple[CachedBlock, CachedBlock | None]:
        """Return the block for a request of more than 0 bytes, and the new segment as one block if it took one.

        The smallest free block that fits is taken, and the lowest of equal ones.
        """
        size = rounded(nbytes)
        small = size <= SMALL
        free = self._free[small]
        at = bisect_left(free, (size, 0))
        new_segment: CachedBlock | None = None
        if at < len(free):
            block = self._blocks[free.pop(at)[1]]
        else:
            block = self._segment(segment_size(size), small)
            new_segment = CachedBlock(block.address, block.size, block.segment, small)
        rest = block.size - size
        if rest >= MIN_BLOCK if small else rest > SMALL:
            other = CachedBlock(
                block.address + size, rest, block.segment, small, before=block, after=block.after
            )
            if block.after is not None:
                block.after.before = other
            block.after, block.size = other, size
            self._keep(other)
        block.requested = nbytes
        return block, new_segment

    def free(self, block: CachedBlock) -> None:
        """Free a block, and join it with its free neighbours."""
        block.requested = 0
        for other in (block.before, block.after):
            if other is not None and not other.requested:
                self._free[other.small].remove((other.size, other.address))
                low, high = (other, block) if other is block.before else (block, other)
                low.size, low.after = low.size + high.size, high.after
                if high.after is not None:
                    high.after.before = low
                del self._blocks[high.address]
                block = low
        self._keep(block)

    def _segment(self, size: int, small: bool) -> CachedBlock:
        block = CachedBlock(self._next, size, self._next, small)
        self.segments[block.address] = self._blocks[block.address] = block
        self.reserved += size
        self._next += size + ROUND_LARGE
        return block

    def _keep(self, block: CachedBlock) -> None:
        self._blocks[block.address] = block
        insort(self._free[block.small], (block.size, block.address))
