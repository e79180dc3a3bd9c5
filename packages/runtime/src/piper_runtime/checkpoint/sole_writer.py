"""Keep two runs from writing checkpoints into one folder at a time: their files would have the same names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from piper_ir.ground.errors import JobError

LOCK = ".lock"
"""The end of the name of a file that is locked."""


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Lock a folder for this run until the block or the process ends; raise JobError while another run holds it.

    A file system without locks holds nobody off.
    """
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise JobError(
            f"another run is writing its checkpoints to {folder}; give each run a folder of its own, or wait for "
            f"its end"
        ) from None
    except OSError:  # the file system has no locks
        pass
    try:
        yield
    finally:
        let_go(lock)


def let_go(lock: FileLock) -> None:
    """Remove the file of a lock that is held, and let others have it; they make a new file."""
    if lock.is_locked:
        with suppress(
            NotADirectoryError
        ):  # the folder may have gone, and something else be in its place
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
