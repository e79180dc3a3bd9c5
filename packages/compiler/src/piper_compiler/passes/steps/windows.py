"""Decide when a role fetches and drops the buckets that its compute uses one after the other: a cache, planned ahead.

All uses are known, so the bucket that is used again last makes room (Belady, A study of replacement algorithms for a
virtual-storage computer, 1966). A *window* is a run of uses of a bucket that stays in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush


@dataclass(eq=False, slots=True)
class CacheWindow:
    """Hold one window of a bucket.

    Attributes:
        bucket: its id.
        uses: the indexes of its uses, ascending.
        earliest: the first use before which it may be fetched, since the bucket's last window has ended by then.
    """

    bucket: str
    uses: list[int] = field(default_factory=list)
    earliest: int = 0


def windows(
    uses: Sequence[Sequence[str]], nbytes: Mapping[str, int], room: int | None
) -> list[CacheWindow]:
    """Return the windows of a role's uses, by their first.

    Args:
        uses: the buckets that each use needs, in the order of the uses.
        nbytes: the bytes of each bucket.
        room: the most bytes that are kept between two uses and are not needed by the second; None: any.
    """
    if room == 0 and all(nbytes[b] for needed in uses for b in needed):
        return _of_runs(uses)
    opened: list[CacheWindow] = []
    open_: dict[str, CacheWindow] = {}
    ended: dict[str, int] = {}
    idle: list[
        tuple[int, str]
    ] = []  # kept buckets by their next use, the last one first; some are closed by now
    following = _following(uses)
    kept = 0
    for index, needed in enumerate(uses):
        for bucket in needed:
            window = open_.get(bucket)
            if window is None:
                window = open_[bucket] = CacheWindow(bucket, earliest=ended.get(bucket, -1) + 1)
                opened.append(window)
                kept += nbytes[bucket]
            window.uses.append(index)
            again = following[index, bucket]
            if again is None:
                del open_[bucket]
                ended[bucket] = index
                kept -= nbytes[bucket]
            else:
                heappush(idle, (-again, bucket))
        if room is None:
            continue
        soon = set(uses[index + 1]) if index + 1 < len(uses) else set()
        spared: list[tuple[int, str]] = []
        free = room + sum([nbytes[b] for b in soon if b in open_])
        while kept > free and idle:
            again, bucket = heappop(idle)
            window = open_.get(bucket)
            if window is None or following[window.uses[-1], bucket] != -again:
                continue  # closed, or used since
            if bucket in soon:
                spared.append((again, bucket))
                continue
            del open_[bucket]
            ended[bucket] = index
            kept -= nbytes[bucket]
        for entry in spared:
            heappush(idle, entry)
    return opened


def _of_runs(uses: Sequence[Sequence[str]]) -> list[CacheWindow]:
    """Return the windows if nothing is kept for a later use than the next: the runs of uses of each bucket."""
    opened: list[CacheWindow] = []
    before: dict[str, CacheWindow] = {}
    last: dict[str, int] = {}
    for index, needed in enumerate(uses):
        now: dict[str, CacheWindow] = {}
        for bucket in needed:
            window = before.get(bucket)
            if window is None:
                window = CacheWindow(bucket, [index], last.get(bucket, -1) + 1)
                opened.append(window)
            else:
                window.uses.append(index)
            now[bucket], last[bucket] = window, index
        before = now
    return opened


def _following(uses: Sequence[Sequence[str]]) -> dict[tuple[int, str], int | None]:
    """Return for each use of a bucket the index of the bucket's next one."""
    next_uses: dict[tuple[int, str], int | None] = {}
    later: dict[str, int] = {}
    for index in reversed(range(len(uses))):
        for bucket in uses[index]:
            next_uses[index, bucket] = later.get(bucket)
            later[bucket] = index
    return next_uses
