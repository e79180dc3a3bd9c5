"""Copy the whole state of a rank into memory of the machine that outlives its process, as host snapshots."""

from __future__ import annotations

import mmap
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from piper_ops import dtype_name
from piper_runtime.checkpoint.rank_tensors import (
    FlatState,
    Portion,
    group_settings,
    optimizer_numbers,
    rank_tensors,
    saved_portion,
    varying_buffers,
)
from piper_runtime.checkpoint.snapshot_files import (
    BYTES,
    INDEX,
    PRESENT,
    CopiedState,
    SnapshotIndex,
    place_name,
)
from piper_runtime.checkpoint.sole_writer import LOCK
from piper_runtime.rank.binding.rank_state import RankState

ALIGNED = 64
"""The alignment of tensors in a file, in bytes."""


@dataclass(frozen=True, slots=True)
class SnapshotOptions:
    """Hold the folder of the ranks' host snapshots, and the number of steps between two of them."""

    folder: str
    every: int


_folders: set[Path] = set()
_writing = threading.Lock()


def drop_snapshots() -> None:
    """Delete the snapshots that this process knows, and let it make no more: nobody else is left to delete them."""
    _writing.acquire()
    for folder in _folders:
        shutil.rmtree(folder.parent, ignore_errors=True)
        with suppress(OSError):  # another worker may have deleted it
            folder.parent.with_name(f"{folder.parent.name}{LOCK}").unlink()


def announce(rank: int, options: SnapshotOptions) -> bool:
    """Show that a rank can write its snapshots; return False if the folder is not on its machine."""
    folder = Path(options.folder)
    try:
        (folder / f"{rank}{PRESENT}").touch()
    except OSError:
        return False
    _folders.add(folder)
    return True


class SnapshotWriter:
    """Copy the state of a rank at the end of steps.

    A rank copies all of its state, also the state that other ranks hold too, so that any of them may be lost. `warn` is
    told once why there is no snapshot.
    """

    def __init__(self, rank: RankState, options: SnapshotOptions, warn: Callable[[str], object]):
        self._rank, self._options, self._warn = rank, options, warn
        self._portion = snapshot_portion(rank)
        self._memory: list[torch.Tensor | None] = [None, None]
        self._turn = 0
        self._able = True

    def step_done(self, done: int) -> None:
        """Copy if a snapshot is due now that so many steps are done."""
        if self._able and done % self._options.every == 0:
            with _writing, torch.no_grad():
                self._take(done)

    def _take(self, done: int) -> None:
        path = Path(self._options.folder, place_name(self._rank.rank, self._turn))
        states = list(rank_tensors(self._rank, self._portion))
        try:
            path.with_suffix(INDEX).unlink(missing_ok=True)
            slots = self._slots(path.with_suffix(BYTES), states)
            copy_states(slots, states)
            write_index(path, self._index(done, states))
        except OSError as e:
            self._able = False
            self._warn(
                f"rank {self._rank.rank} keeps no host snapshots: {path.parent}: {e.strerror}"
            )
        self._turn += 1

    def _slots(self, path: Path, states: Sequence[FlatState]) -> list[torch.Tensor]:
        """Return memory for each state: the memory of the snapshot before the last, unless there is more to copy."""
        ends = _offsets(states)
        memory = self._memory[self._turn % 2]
        if memory is None or memory.numel() != max(ends[-1], 1):
            memory = self._memory[self._turn % 2] = _shared_memory(path, max(ends[-1], 1))
        return [
            memory[at : at + s.tensor.nbytes].view(s.tensor.dtype) if s.tensor.numel() else s.tensor
            for at, s in zip(ends, states, strict=False)
        ]

    def _index(self, done: int, states: Sequence[FlatState]) -> SnapshotIndex:
        rank = self._rank
        copied = [
            CopiedState(dtype_name(s.tensor.dtype), at, s.ranges)
            for at, s in zip(_offsets(states), states, strict=False)
        ]
        return SnapshotIndex(
            done,
            tuple(copied),
            optimizer_numbers(rank, self._portion),
            group_settings(rank.optimizer.groups),
            rank.scale_state,
        )


def snapshot_portion(rank: RankState) -> Portion:
    """Return the states that a rank copies: all, except buffers that follow the batch and that another rank saves."""
    varying, own = varying_buffers(rank.plan), saved_portion(rank.plan, rank.rank)
    buffers = frozenset(
        name for name in rank.store.buffers if name not in varying or name in own.buffers
    )
    return replace(
        own,
        buckets=frozenset(b.id for b in rank.store.buckets),
        params=frozenset(rank.store.params),
        buffers=buffers,
    )


def copy_states(slots: Sequence[torch.Tensor], states: Sequence[FlatState]) -> None:
    """Copy tensors to the host, and return when they are there."""
    for slot, state in zip(slots, states, strict=True):
        slot.copy_(state.tensor)


def write_index(path: Path, index: SnapshotIndex) -> None:
    """Make a copied state valid, atomically."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(index, protocol=5))
    unfinished.replace(path.with_suffix(INDEX))


def _offsets(states: Sequence[FlatState]) -> list[int]:
    """Return the offset of each tensor in a file, and at last the end of the file."""
    offsets = [0]
    for state in states:
        offsets.append(-(-(offsets[-1] + state.tensor.nbytes) // ALIGNED) * ALIGNED)
    return offsets


def _shared_memory(path: Path, size: int) -> torch.Tensor:
    """Return the bytes of a file as a tensor; raise OSError if there is no room for them.

    The room is taken at once: a write into a file without room would end the process.
    """
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    finally:
        os.close(descriptor)
