"""Provide the initial tensors of a model as a mapping that makes or reads each tensor when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from piper_ir.ground.errors import JobError
from piper_runtime.weights.recording import Recording
from piper_runtime.weights.renaming import PlacedTensor, listed

COMPARED = 1 << 16
"""The elements at both ends of tied tensors that are compared in files."""


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Hold shape and dtype of a tensor that is not made."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class LazyTensors(Mapping[str, Tensor]):
    """Make each tensor anew whenever it is asked for, in the dtype of its `forms`; nothing is kept.

    A tensor is read from a file if `files` has it, and made by the recorded constructor otherwise.
    """

    def __init__(
        self,
        forms: Mapping[str, TensorForm],
        recording: Recording,
        files: Mapping[str, PlacedTensor] | None = None,
    ) -> None:
        self.forms = dict(forms)
        self._recording = recording
        self._files = dict(files or {})

    def __getitem__(self, name: str) -> Tensor:
        form = self.forms[name]
        value = self._files[name].whole() if name in self._files else self._recording.tensor(name)
        return value.to(form.dtype)

    def __contains__(self, name: object) -> bool:
        return name in self.forms

    def __iter__(self) -> Iterator[str]:
        return iter(self.forms)

    def __len__(self) -> int:
        return len(self.forms)

    def flat(self, name: str, start: int, stop: int) -> Tensor:
        """Return the elements from `start` to `stop` of a row-major tensor; of a file, only they are read."""
        if name in self._files:
            return self._files[name].flat(start, stop).to(self.forms[name].dtype)
        return self[name].reshape(-1)[start:stop].clone()

    def in_file(self, name: str) -> bool:
        """Return whether a tensor is read from a file; there a range costs its own bytes only."""
        return name in self._files

    def part(self, names: Iterable[str]) -> LazyTensors:
        """Return these tensors alone, with only the calls and files that they need, to be sent to a rank."""
        forms = {name: self.forms[name] for name in names}
        recorded = [name for name in forms if name not in self._files]
        return LazyTensors(
            forms,
            self._recording.part(recorded),
            {n: self._files[n] for n in forms if n in self._files},
        )


def matched(
    files: Mapping[str, PlacedTensor],
    forms: Mapping[str, TensorForm],
    wanted: Iterable[str],
    aliases: Mapping[str, str],
) -> dict[str, PlacedTensor]:
    """Return the files' tensor for each tensor of a model; raise JobError with all names if they do not fit.

    `wanted` names the tensors that files must have, and `aliases` gives the first name of a tied tensor for its others;
    a file may have any of them, and they must be alike.
    """
    tensors: dict[str, PlacedTensor] = {}
    names = {name: name for name in wanted}
    names |= {other: first for other, first in aliases.items() if first in names}
    unequal = [
        f"{first!r} is tied to {name!r} in the model, and they differ in the files; untie them, or leave one out "
        f"by rename"
        for name, first in names.items()
        if name in files and not _alike(tensors.setdefault(first, files[name]), files[name])
    ]
    missing = [name for name in dict.fromkeys(names.values()) if name not in tensors]
    extra = [_origin(name, placed) for name, placed in files.items() if name not in names]
    problems = []
    if missing:
        problems.append(f"the files lack {listed(missing)} of the model")
    if extra:
        problems.append(f"the model has no place for {listed(extra)} of the files")
    problems += unequal
    problems += [
        problem
        for name, placed in tensors.items()
        for problem in _unlike(name, placed, forms[name])
    ]
    if problems:
        raise JobError("; ".join(problems[:3]))
    return tensors


def _alike(one: PlacedTensor, other: PlacedTensor) -> bool:
    """Return whether two tensors of files have equal first and last elements, as copies of one tensor do."""
    if one is other or one.shape != other.shape:
        return one is other
    size = math.prod(one.shape)
    ends = ((0, min(size, COMPARED)), (max(0, size - COMPARED), size))
    return all(torch.equal(one.flat(a, b).double(), other.flat(a, b).double()) for a, b in ends)


def _origin(name: str, placed: PlacedTensor) -> str:
    first = placed.pieces[0].origin
    return name if first == name else f"{name} ({first})"


def _unlike(name: str, placed: PlacedTensor, form: TensorForm) -> Iterator[str]:
    """Yield why a tensor of a file cannot be one of the model: other sizes, or numbers of another kind."""
    origin = placed.pieces[0].origin
    if placed.shape != form.shape:
        yield (
            f"{name!r} has shape {list(form.shape)}, and {origin!r} of the files has {list(placed.shape)}"
        )
    elif placed.dtype != form.dtype and not (
        placed.dtype.is_floating_point and form.dtype.is_floating_point
    ):
        yield f"{name!r} is {form.dtype}, and {origin!r} of the files is {placed.dtype}"


def part_of(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Mapping[str, Tensor]:
    """Return some of the tensors, to be sent to another process: copies, or how to make them."""
    if isinstance(tensors, LazyTensors):
        return tensors.part(names)
    return {name: tensors[name].clone() for name in names}


def forms_of(tensors: Mapping[str, Tensor]) -> Mapping[str, TensorForm]:
    """Return shapes and dtypes, without making a tensor."""
    if isinstance(tensors, LazyTensors):
        return tensors.forms
    return {name: TensorForm(tuple(t.shape), t.dtype) for name, t in tensors.items()}


def flat_range(tensors: Mapping[str, Tensor], name: str, start: int, stop: int) -> Tensor:
    """Return the elements from `start` to `stop` of a row-major tensor, such as the shard of a rank."""
    if isinstance(tensors, LazyTensors):
        return tensors.flat(name, start, stop)
    return tensors[name].reshape(-1)[start:stop]
