"""Reserve memory for further rounds, so that a step's peak is the same with and without them."""

from __future__ import annotations

from functools import lru_cache
from mmap import mmap

import torch


@lru_cache(maxsize=64)
def _pages(room: int) -> mmap:
    return mmap(-1, room)


def reserve(room: int, device: torch.device) -> None:
    """Allocate the memory of further rounds, whether there will be some or not.

    On a CPU it is mapped directly: malloc would use the freed pages again for the step's own tensors. The system
    assigns pages when they are written, and these never are.
    """
    if device.type == "cpu" and room:
        torch.frombuffer(_pages(room), dtype=torch.uint8).view(-1)
    else:
        torch.empty(room, dtype=torch.uint8, device=device)
