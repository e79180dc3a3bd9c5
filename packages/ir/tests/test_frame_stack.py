"""Tests of the room for frames: no chunk of frames is mapped and freed at each call."""

from __future__ import annotations

import resource
from collections.abc import Callable
from functools import wraps

from piper_ir.tools import room_for_frames

CALLS = 500
DEPTHS = range(400)


def calls_at(depth: int) -> int:
    """Return the page faults of a loop of calls, `depth` calls further down."""
    if depth:
        return calls_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        leaf()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def leaf() -> tuple[int, ...]:
    """Have a frame larger than that of `calls_at`, so that at some depth only the latter fits into its chunk."""
    return (*range(3), *(lambda a, b, c, d, e, f, g, h: (a, b, c, d, e, f, g, h))(*range(8)))


def wrapped(call: Callable[[int], int]) -> Callable[[int], int]:
    @wraps(call)
    def plain(depth: int) -> int:
        return call(depth)

    return plain


def test_calls_below_a_decorated_one_map_no_memory() -> None:
    assert max(map(wrapped(calls_at), DEPTHS)) > CALLS / 2  # a chunk ends at one of these depths
    assert max(map(room_for_frames(calls_at), DEPTHS)) < CALLS / 10


def test_a_decorated_function_is_called_as_before() -> None:
    decorated = room_for_frames(calls_at)
    assert decorated.__name__ == "calls_at" and decorated(depth=1) < CALLS
