"""Start worker processes for CUDA whose ranks are joined in a given way, for fewer devices than ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from piper_runtime.launch import Pool
from piper_runtime.transport import SHARED_DEVICE


@contextmanager
def joined_pool(world: int, how: str) -> Iterator[Pool]:
    """Open a pool whose ranks are joined by `how`, "gloo" or "nccl" (`SHARED_DEVICE` in the environment).

    It holds also for workers that are started again inside of the block, after a failure.
    """
    with patch.dict(os.environ, {SHARED_DEVICE: how}), Pool(world) as workers:
        yield workers
