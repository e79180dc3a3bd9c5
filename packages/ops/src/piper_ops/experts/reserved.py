"""Ask for memory that may be needed, so that a step holds as much whether it is or not."""

from __future__ import annotations

from functools import lru_cache
from mmap import mmap

import torch


@lru_cache(maxsize=64)
def _pages(room: int) -> mmap:
    return mmap(-1, room)


def reserve(room: int, device: torch.device) -> None:
    """Ask for the memory of further rounds, whether there will be some or not.

    A CPU's is asked of the system itself: malloc, given back as much, hands over pages that the step uses next. The
    system gives pages when they are written, and these never are.
    """
    if device.type == "cpu" and room:
        torch.frombuffer(_pages(room), dtype=torch.uint8).view(-1)
    else:
        torch.empty(room, dtype=torch.uint8, device=device)
