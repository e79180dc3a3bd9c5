"""Keep the host snapshots of a run's ranks from one attempt to the next, and delete them when the run is over."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

from filelock import FileLock

from piper_ir.plan.plan import Plan
from piper_runtime.checkpoint.host_snapshots import SnapshotOptions
from piper_runtime.checkpoint.rank_tensors import left_out, model_key
from piper_runtime.checkpoint.snapshot_files import (
    HostSnapshot,
    forget_ranks,
    newest_snapshot,
    present,
)
from piper_runtime.checkpoint.sole_writer import LOCK, let_go

PREFIX = "piper-snapshots-"
"""The beginning of the names of folders in memory; the process id of their owner follows."""
IN_MEMORY = Path("/dev/shm")


class Survivors:
    """Hold the folder of a run's snapshots: each attempt writes into a subfolder of its own.

    The copies of a rank that died do not count, since the cause of its end may have damaged them, or ended its machine.
    Copies count only while all ranks are on this machine and can reach them.
    """

    def __init__(self, folder: Path | None, every: int):
        self._root, self._every = folder, every
        self._attempts = 0
        self._current: Path | None = None
        self._kept: Path | None = None

    def options(self) -> SnapshotOptions | None:
        """Return the options of the next attempt's snapshots; None if none are made."""
        if self._root is None:
            return None
        self._current = self._root / str(self._attempts)
        self._current.mkdir()
        self._attempts += 1
        return SnapshotOptions(str(self._current), self._every)

    def newest(self, plan: Plan, lost: Sequence[int], most: int, least: int) -> HostSnapshot | None:
        """Return the newest snapshot for a run to go on from after a failed attempt with a plan; None without one.

        It is one after at most `most` steps, the ones with known results, and after more than `least`. Everything else
        is deleted.
        """
        if self._current is None:
            return None
        forget_ranks(self._current, lost)
        unused = {name for kind in left_out(plan) for name in kind}
        names = [
            model_key(n)
            for n in (*(p.name for p in plan.params), *(b.name for b in plan.buffers))
            if n not in unused
        ]
        snapshot: HostSnapshot | None = None
        folders = [folder for folder in (self._current, self._kept) if folder is not None]
        if present(self._current, plan.mesh.world):
            snapshots = [
                s for folder in folders if (s := newest_snapshot(folder, names, most)) is not None
            ]
            snapshot = max(
                (s for s in snapshots if s.step > least), key=lambda s: s.step, default=None
            )
        self._current, self._kept = None, snapshot.folder if snapshot is not None else None
        for folder in folders:
            if folder != self._kept:
                shutil.rmtree(folder)
        if snapshot is not None:
            snapshot.drop_others()
        return snapshot


@contextmanager
def survivors(every: int | None) -> Iterator[Survivors]:
    """Yield the keeper of a run's snapshots, which are made after `every` steps and are gone when the block ends.

    None stands for no snapshots.
    """
    if every is None:
        yield Survivors(None, 0)
        return
    home = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    _sweep(home)
    folder, lock = _locked_folder(home)
    try:
        yield Survivors(folder, every)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        let_go(lock)


def _locked_folder(home: Path) -> tuple[Path, FileLock]:
    """Make a folder whose lock this process holds as long as it uses it."""
    folder = home / f"{PREFIX}{os.getpid()}-{token_hex(8)}"
    lock = _lock_of(folder)
    with suppress(
        OSError
    ):  # a file system without locks, where nobody finds out that a folder was left
        lock.acquire()
    folder.mkdir(mode=0o700)
    return folder, lock


def _lock_of(folder: Path) -> FileLock:
    """Return the lock of a folder, a file beside it: so it is locked before it is there."""
    return FileLock(folder.with_name(f"{folder.name}{LOCK}"))


def _sweep(home: Path) -> None:
    """Delete the folders of runs that were killed together with all their workers: nobody locks them."""
    for folder in {
        path.with_name(path.name.removesuffix(LOCK)) for path in home.glob(f"{PREFIX}*")
    }:
        lock = _lock_of(folder)
        with suppress(OSError):  # in use (Timeout is an OSError), another user's, or without locks
            lock.acquire(timeout=0)
            shutil.rmtree(folder, ignore_errors=True)
            let_go(lock)
