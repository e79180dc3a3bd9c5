"""Let a process keep the memory that it frees, for its next step."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

MALLOPT = "mallopt"
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""The numbers of glibc's settings (malloc.h)."""
NEVER = -1
OWN_MAPPING = 32 << 20
"""The least bytes of a tensor with a memory mapping of its own: the limit of glibc's own adaptation."""


def keep_freed_memory(environment: Mapping[str, str] | None = None) -> bool:
    """Tell glibc to keep freed memory; return False under another C library, or if the environment sets malloc.

    Each step asks for the memory that the one before has freed. By default glibc gives most of it back to the system at
    each step's end, and gets it back page by page, each filled with zeros first: that took a tenth of the time of a
    mixture's step. The process needs its peak memory anyway, again and again.
    """
    said = os.environ if environment is None else environment
    if any(name.startswith("MALLOC_") for name in said) or "glibc.malloc" in said.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    mallopt = getattr(ctypes.CDLL(None), MALLOPT, None)
    return (
        mallopt is not None
        and bool(mallopt(TRIM_THRESHOLD, NEVER))
        and bool(mallopt(MMAP_THRESHOLD, OWN_MAPPING))
    )
