"""Name the files of host snapshots, and read the ranks' copies.

A host snapshot is a copy of the state after a step in memory of the machine, in files that outlive the process of a
rank. Each rank has two places, which it uses in turn. Each place has a file of bytes and an index, which lists the
tensors in the bytes. The index is deleted before the bytes are written over, and written when they are complete. So a
place with an index holds a whole copy, whenever its rank ended.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from piper_ir.ground.errors import ExecutionError
from piper_runtime.checkpoint.rank_tensors import NamedRange, Number

INDEX, BYTES, PRESENT = ".index", ".bytes", ".present"
"""The ends of the names of files: an index, the bytes beside it, and the sign that a rank can write here."""


@dataclass(frozen=True, slots=True)
class CopiedState:
    """Hold the offset of a flat tensor in a file, and the ranges of named tensors in it."""

    dtype: str
    at: int
    ranges: tuple[NamedRange, ...]


@dataclass(frozen=True, slots=True)
class SnapshotIndex:
    """Describe the copy of one rank.

    Attributes:
        step: the number of steps that are done.
        states: the flat tensors in the bytes.
        numbers: the optimizer's state beside tensors, by name.
        groups: the settings of the optimizer's groups.
        loss_scale: the scale of the loss, see `RunningScale.state`; empty if it is not scaled.
    """

    step: int
    states: tuple[CopiedState, ...]
    numbers: Mapping[str, Number]
    groups: Sequence[Mapping[str, Any]]
    loss_scale: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CopiedPiece:
    """Describe a range of a named tensor: `numel` elements from `start` on, at byte `at` of a file."""

    path: str
    at: int
    start: int
    numel: int


@dataclass(frozen=True)
class CopiedTensor:
    """Hold a tensor of a host snapshot as one that is read by ranges; pieces may overlap, and hold the same there."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[CopiedPiece, ...]

    def missing(self) -> int:
        """Return how many elements no piece has."""
        end = gaps = 0
        for piece in sorted(self.pieces, key=lambda p: p.start):
            gaps += max(piece.start - end, 0)
            end = max(end, piece.start + piece.numel)
        return gaps + max(prod(self.shape) - end, 0)

    def flats(self, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return the elements of some ranges [start, stop) of the row-major tensor, one behind the other.

        Raises ExecutionError if they are not on this machine.
        """
        pieces = sorted(self.pieces, key=lambda p: p.start)
        return torch.cat([self._flat(start, stop, pieces) for start, stop in ranges])

    def _flat(self, start: int, stop: int, pieces: Sequence[CopiedPiece]) -> torch.Tensor:
        elements = torch.empty(stop - start, dtype=self.dtype)
        at = start
        for piece in pieces:
            end = min(piece.start + piece.numel, stop)
            if piece.start <= at < end:
                elements[at - start : end - start] = self._read(piece, at, end)
                at = end
        if at < stop:
            raise ExecutionError(
                f"a host snapshot lacks {stop - at} elements of a tensor: a mistake of Piper's"
            )
        return elements

    def _read(self, piece: CopiedPiece, start: int, stop: int) -> torch.Tensor:
        size = self.dtype.itemsize
        try:
            with open(piece.path, "rb") as file:
                file.seek(piece.at + (start - piece.start) * size)
                data = bytearray(file.read((stop - start) * size))
        except OSError as e:
            raise ExecutionError(
                f"the host snapshot {piece.path} cannot be read on this machine: {e.strerror}"
            ) from None
        return torch.frombuffer(data, dtype=self.dtype)


@dataclass(frozen=True)
class HostSnapshot:
    """Hold the ranks' copies of the whole state after a step.

    Attributes:
        step: the number of steps that are done.
        ranks: the ranks that made the copies.
        tensors: the place of each tensor, by its name in a checkpoint.
        numbers: the optimizer's state beside tensors, by name.
        groups: the settings of the optimizer's groups.
        folder: the folder of the files.
        loss_scale: as in `SnapshotIndex`.
    """

    step: int
    ranks: tuple[int, ...]
    tensors: Mapping[str, CopiedTensor]
    numbers: Mapping[str, Number]
    groups: tuple[Mapping[str, Any], ...]
    folder: Path
    loss_scale: Mapping[str, float]

    def drop_others(self) -> None:
        """Delete the other files in its folder."""
        used = {piece.path for tensor in self.tensors.values() for piece in tensor.pieces}
        for path in self.folder.glob(f"*{BYTES}"):
            if str(path) not in used:
                path.with_suffix(INDEX).unlink(missing_ok=True)
                path.unlink()

    @property
    def text(self) -> str:
        """Return whose copies they are, for people."""
        several = "s" * (len(self.ranks) > 1)
        return f"the host snapshot{several} of rank{several} {', '.join(map(str, self.ranks))} after {self.step} steps"


def place_name(rank: int, turn: int) -> str:
    """Return the beginning of the names of the files of one of a rank's places."""
    return f"{rank}-{turn % 2}"


def forget_ranks(folder: Path, ranks: Sequence[int]) -> None:
    """Delete the copies of some ranks."""
    for rank in ranks:
        for turn in range(2):
            for end in (INDEX, BYTES):
                (folder / (place_name(rank, turn) + end)).unlink(missing_ok=True)


def present(folder: Path, world: int) -> bool:
    """Return whether so many ranks could write into a folder: they are on this machine."""
    return all((folder / f"{rank}{PRESENT}").exists() for rank in range(world))


def newest_snapshot(folder: Path, names: Sequence[str], most: int) -> HostSnapshot | None:
    """Return the newest snapshot that holds the whole state, after at most so many steps; None if there is none.

    `names` are the tensors that it must have in any case; any other tensor with a piece in it must be complete.
    """
    copies_by_step: dict[int, dict[int, tuple[Path, SnapshotIndex]]] = {}
    for path in sorted(folder.glob(f"*{INDEX}")):
        with suppress(OSError):
            index: SnapshotIndex = pickle.loads(
                path.read_bytes()
            )  # of our own ranks, in a folder that is ours alone
            copies_by_step.setdefault(index.step, {})[int(path.name.partition("-")[0])] = (
                path.with_suffix(BYTES),
                index,
            )
    for step in sorted((s for s in copies_by_step if s <= most), reverse=True):
        snapshot = _joined(folder, step, copies_by_step[step])
        if all(name in snapshot.tensors for name in names) and not any(
            t.missing() for t in snapshot.tensors.values()
        ):
            return snapshot
    return None


def _joined(
    folder: Path, step: int, copies: Mapping[int, tuple[Path, SnapshotIndex]]
) -> HostSnapshot:
    """Return the snapshot that the ranks' copies after a step make together."""
    pieces: dict[str, list[CopiedPiece]] = {}
    forms: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    numbers: dict[str, Number] = {}
    for path, index in copies.values():
        numbers |= index.numbers
        for state in index.states:
            dtype: torch.dtype = getattr(torch, state.dtype)
            for found in state.ranges:
                at = state.at + found.offset * dtype.itemsize
                pieces.setdefault(found.key, []).append(
                    CopiedPiece(str(path), at, found.start, found.numel)
                )
                forms[found.key] = dtype, found.shape
    tensors = {key: CopiedTensor(*forms[key], tuple(found)) for key, found in pieces.items()}
    any_of = next(iter(copies.values()))[1]
    return HostSnapshot(
        step, tuple(sorted(copies)), tensors, numbers, tuple(any_of.groups), folder, any_of.loss_scale
    )  # fmt: skip
