"""Worker processes for CUDA whose ranks are joined in a given way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from piper_runtime.processes import Pool
from piper_runtime.transport import SHARED_DEVICE


@contextmanager
def joined_pool(world: int, how: str) -> Iterator[Pool]:
    """`how`: what joins ranks that share a device, "gloo" or "nccl"; with a device for each it is NCCL in any case. Workers that
    are started again inside of the block, after a failure, are joined so too."""
    with pytest.MonkeyPatch.context() as env:
        env.setenv(SHARED_DEVICE, how)
        with Pool(world) as workers:
            yield workers
