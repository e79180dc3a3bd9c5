"""Map the tensors of a file to a model's: under other names, in parts, transposed or stacked."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from piper_ir.ground.errors import JobError

SHOWN = 4
"""The number of names that a message lists."""


@dataclass(frozen=True)
class Into:
    """Hold the place of a file's tensor in the model.

    Attributes:
        name: the model's name; each `*` stands for the text that the same `*` of the pattern has matched. A number in
            brackets at the end is an entry of the tensor's first dimension: "experts.up[*]".
        rows: the rows of the file's tensor, from and to; None for all.
        transposed: whether the model has the transposed matrix.
    """

    name: str
    rows: tuple[int, int] | None = None
    transposed: bool = False


RenameTarget = str | None | Into | tuple[Into, ...]
"""The place of a file's tensor in the model: a name, or None if it has none."""
Renames = Mapping[str, RenameTarget]
"""The places in the model by patterns of names in the file; the first pattern that matches counts."""


class FileTensor(Protocol):
    """Describe a tensor that is read by boxes."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def flat(self, start: int, stop: int) -> Tensor: ...
    def box(self, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor: ...


@dataclass(frozen=True)
class HeldTensor:
    """Hold a tensor in memory as one that is read by boxes."""

    content: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.content.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.content.shape)

    def flat(self, start: int, stop: int) -> Tensor:
        """Return some elements of the row-major tensor."""
        return self.content.reshape(-1)[start:stop]

    def box(self, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Return a box of the tensor."""
        return self.content[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))]


@dataclass(frozen=True)
class WeightPiece:
    """Hold a file's tensor for a tensor of the model: for all of it, or for an entry of its first dimension.

    Attributes:
        origin: the tensor's name in the file.
        stored: the tensor there.
        into: which rows of it, and whether they are transposed.
        entry: the entry of the model's tensor; None for all of it.
    """

    origin: str
    stored: FileTensor
    into: Into
    entry: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape in the model."""
        shape = self.stored.shape
        if self.into.rows is not None:
            shape = (self.into.rows[1] - self.into.rows[0], *shape[1:])
        return shape[::-1] if self.into.transposed else shape

    def flat(self, start: int, stop: int) -> Tensor:
        """Return some elements of the row-major piece; of a transposed one, whole columns around them are read."""
        first = self.into.rows[0] if self.into.rows else 0
        if not self.into.transposed:
            before = first * math.prod(self.stored.shape[1:])
            return self.stored.flat(before + start, before + stop)
        length = self.shape[1]  # a row here is a column there
        low, high = start // length, -(-stop // length)
        columns = self.stored.box((first, low), (length, high - low))
        return columns.t().reshape(-1)[start - low * length : stop - low * length]


@dataclass(frozen=True)
class PlacedTensor:
    """Hold the pieces that make one tensor of the model: one, or one for each entry of its first dimension."""

    pieces: tuple[WeightPiece, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape in the model."""
        first = self.pieces[0]
        return first.shape if first.entry is None else (len(self.pieces), *first.shape)

    def flat(self, start: int, stop: int) -> Tensor:
        """Return the elements from `start` to `stop` of the row-major tensor, in the file's dtype."""
        if len(self.pieces) == 1:
            return self.pieces[0].flat(start, stop)
        size = math.prod(self.pieces[0].shape)
        elements = torch.empty(stop - start, dtype=self.dtype)
        for k, piece in enumerate(self.pieces):
            low, high = max(start, k * size), min(stop, (k + 1) * size)
            if low < high:
                elements[low - start : high - start] = piece.flat(low - k * size, high - k * size)
        return elements

    def whole(self) -> Tensor:
        """Return the tensor, in the file's dtype."""
        return self.flat(0, math.prod(self.shape)).view(self.shape)


def rename_problem(renames: object) -> str | None:
    """Return the problem with a mapping of names, or None."""
    if not isinstance(renames, Mapping):
        return (
            "a mapping from patterns of names in the file to names in the model is needed, such as "
            "{'h.*': 'layers.*'}"
        )
    for pattern, target in renames.items():
        if not isinstance(pattern, str):
            return f"the pattern {pattern!r} is no text"
        targets = target if isinstance(target, tuple) else (target,)
        if not all(t is None or isinstance(t, str | Into) for t in targets):
            return f"{pattern!r} goes to {target!r}; a name of the model, or None to leave it out, is needed"
        for name in (t.name if isinstance(t, Into) else t for t in targets if t is not None):
            if name.count("*") > pattern.count("*"):
                return f"{name!r} has more `*` than {pattern!r}, which is to fill them"
    return None


def placed(stored: Mapping[str, FileTensor], renames: Renames) -> dict[str, PlacedTensor]:
    """Return a file's tensors by the model's names; raise JobError for a tensor that is given twice."""
    pieces: dict[str, list[WeightPiece]] = {}
    for origin, tensor in stored.items():
        for into in _targets(origin, renames):
            name, entry = _entry(into.name)
            pieces.setdefault(name, []).append(_checked(WeightPiece(origin, tensor, into, entry)))
    return {name: _joined(name, parts) for name, parts in pieces.items()}


def _targets(origin: str, renames: Renames) -> Iterator[Into]:
    """Yield the places of a file's tensor, with their names filled in; without a pattern for it, it keeps its name."""
    for pattern, target in renames.items():
        match = _expression(pattern).fullmatch(origin)
        if match is None:
            continue
        for into in target if isinstance(target, tuple) else (target,):
            if into is not None:
                into = Into(into) if isinstance(into, str) else into
                yield Into(_filled(into.name, match.groups()), into.rows, into.transposed)
        return
    yield Into(origin)


def _filled(name: str, texts: Iterable[str]) -> str:
    """Return a name with texts in place of its stars."""
    left = iter(texts)
    return re.sub(r"\*", lambda _: next(left), name)


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile("(.+?)".join(map(re.escape, pattern.split("*"))), re.DOTALL)


def _entry(name: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(.+)\[(\d+)\]", name)
    return (match[1], int(match[2])) if match else (name, None)


def _checked(piece: WeightPiece) -> WeightPiece:
    """Refuse rows and transpositions that a tensor of the file does not have."""
    shape, rows = piece.stored.shape, piece.into.rows
    if rows is not None and not (shape and 0 <= rows[0] < rows[1] <= shape[0]):
        raise JobError(
            f"{piece.origin!r} has shape {list(shape)}; rename takes rows {rows[0]} to {rows[1]} of it"
        )
    if piece.into.transposed and len(shape) != 2:
        raise JobError(
            f"{piece.origin!r} has shape {list(shape)}; rename transposes it, which takes a matrix"
        )
    return piece


def _joined(name: str, pieces: list[WeightPiece]) -> PlacedTensor:
    """Return the pieces of one tensor in order; refuse an entry that is given twice, or not at all."""
    if len(pieces) == 1 and pieces[0].entry is None:
        return PlacedTensor(tuple(pieces))
    ordered = sorted(pieces, key=lambda piece: -1 if piece.entry is None else piece.entry)
    for k, piece in enumerate(ordered):
        if piece.entry is None or (k and piece.entry == ordered[k - 1].entry):
            other = ordered[1 if k == 0 else k - 1]
            raise JobError(
                f"{piece.origin!r} and {other.origin!r} both go to {name!r} of the model; see Job(rename={{...}})"
            )
        if piece.entry != k:
            raise JobError(f"nothing in the file goes to entry {k} of {name!r} of the model")
        if (piece.stored.dtype, piece.shape) != (ordered[0].stored.dtype, ordered[0].shape):
            raise JobError(
                f"{ordered[0].origin!r} and {piece.origin!r}, entries of {name!r}, differ in shape or dtype"
            )
    return PlacedTensor(tuple(ordered))


def listed(names: list[str]) -> str:
    """Return some names for a message."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more
