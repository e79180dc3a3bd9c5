"""Pauses of Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For work that makes very many objects, few of them in reference cycles: the collector would walk them again and again while
    they grow (twice the time for a graph of 25,000 nodes, a tenth more for the capture of a model)."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
