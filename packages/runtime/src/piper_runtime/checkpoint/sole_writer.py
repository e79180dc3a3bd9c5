"""Keep two runs from writing checkpoints into one folder at a time: their files would have the same names."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from piper_ir.errors import JobError


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Lock a folder for this run until the block or the process ends; raise JobError while another run holds it.

    A file system without locks holds nobody off.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not _locked(descriptor):
            raise JobError(
                f"another run is writing its checkpoints to {folder}; give each run a folder of its own, or wait for its end"
            )
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Lock a folder until it is closed; return False where somebody else has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return True
    return True
