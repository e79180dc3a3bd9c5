"""Read the tensors of torch's distributed checkpoints (DCP): their metadata, a pickle that is read without trust.

torch unpickles it, which runs any code that a stranger has written into it. Here an unpickler makes the classes of
DCP's metadata only, and the objects are checked before they are used.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile, is_zipfile

import torch
from torch import Tensor

from piper_ir.ground.errors import FormatError, JobError
from piper_ir.tools import unread
from piper_ops import dtype_name
from piper_runtime.weights.boxes import Box, boxes_of_ranges

DCP_METADATA = ".metadata"
"""The name of the file that makes a folder a DCP."""
MOST_BYTES = 1 << 30
"""The most bytes of metadata that are read, enough for a checkpoint with millions of tensors."""
DCP_HOME = "torch.distributed.checkpoint"
_CLASSES: Mapping[str, frozenset[str]] = {
    f"{DCP_HOME}.metadata": frozenset(
        {
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
            "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        }
    ),
    f"{DCP_HOME}.filesystem": frozenset({"_StorageInfo"}),
    "torch": frozenset({"Size"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "collections": frozenset({"OrderedDict"}),
    "pathlib": frozenset({"Path", "PosixPath", "WindowsPath", "PurePosixPath"}),
    "pathlib._local": frozenset({"Path", "PosixPath", "WindowsPath", "PurePosixPath"}),
}  # fmt: skip
"""The names that a metadata pickle may use, by module; beside them torch's dtypes."""

BROKEN = (
    pickle.UnpicklingError, struct.error, EOFError, AttributeError, ImportError, LookupError, TypeError, ValueError,
    ArithmeticError, MemoryError, RuntimeError, AssertionError,
)  # fmt: skip
"""The errors of pickle and of torch's classes when a pickle is truncated, or was made up by somebody."""


@dataclass(frozen=True, slots=True)
class SavedBox:
    """Hold the place of a tensor's box in a checkpoint.

    Attributes:
        key: the tensor's name in the checkpoint.
        shape: the shape of the whole tensor.
        file: the name of the file in the checkpoint's folder.
        at: the offset of the box in the file, in bytes.
        nbytes: its length there.
        checksum: the CRC-32 of the box's elements; None if the checkpoint does not have it.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    nbytes: int
    checksum: int | None = None

    @property
    def box(self) -> Box:
        """Return the box."""
        return Box(self.offsets, self.sizes)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Hold the places of a tensor in a checkpoint: boxes that cover it."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[SavedBox, ...]


def read_metadata(data: bytes, where: str) -> dict[str, SavedTensor]:
    """Return the tensors that the metadata of a checkpoint describes, by name; `where` names it in messages.

    Raises FormatError for bytes that are no such metadata, or that describe impossible tensors.
    """
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        tensors, storage = metadata.state_dict_metadata, metadata.storage_data
        if (
            type(metadata).__name__ != "Metadata"
            or not isinstance(tensors, dict)
            or not isinstance(storage, dict)
        ):
            raise ValueError("it describes no checkpoint")
        chunks = {(index.fqn, tuple(index.offset or ())): info for index, info in storage.items()}
        return {
            key: _tensor(key, tensor, chunks)
            for key, tensor in tensors.items()
            if not _is_bytes(tensor)
        }
    except BROKEN as e:
        raise FormatError(
            f"{where} is no metadata of a checkpoint, or was changed ({e or type(e).__name__}); "
            f"take another checkpoint"
        ) from None


def _is_bytes(entry: Any) -> bool:
    return type(entry).__name__ == "BytesStorageMetadata"


def _tensor(key: Any, found: Any, chunks: Mapping[Any, Any]) -> SavedTensor:
    dtype, shape = found.properties.dtype, found.size
    if not isinstance(key, str) or not isinstance(dtype, torch.dtype):
        raise ValueError(f"{key!r:.80} has no dtype")
    name, sizes = dtype_name(dtype), _numbers(shape)
    boxes = []
    for chunk in found.chunks:
        box = Box(_numbers(chunk.offsets), _numbers(chunk.sizes))
        info = chunks[key, box.offsets]
        if not box.inside(sizes):
            raise ValueError(f"{key!r:.80} has a piece outside of its shape {list(sizes)}")
        if not (
            isinstance(info.relative_path, str) and type(info.offset) is type(info.length) is int
        ):
            raise ValueError(f"{key!r:.80} has a piece in no file")
        if getattr(info, "transform_descriptors", None):
            raise ValueError(
                f"{key!r:.80} was written by an extension ({info.transform_descriptors!r:.80})"
            )
        boxes.append(
            SavedBox(
                key,
                name,
                sizes,
                box.offsets,
                box.sizes,
                info.relative_path,
                info.offset,
                info.length,
            )
        )
    return SavedTensor(name, sizes, tuple(boxes))


def _numbers(size: Any) -> tuple[int, ...]:
    if not isinstance(size, tuple) or not all(type(n) is int and n >= 0 for n in size):
        raise ValueError(f"{size!r:.80} is no shape")
    return tuple(size)


class _Unpickler(pickle._Unpickler):
    """Make objects of known classes only.

    It is the one in Python: the one in C makes room for as many objects as a stranger claims.
    """

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(torch_dtype := getattr(torch, name, None), torch.dtype):
            return torch_dtype
        if (module, name) == (
            "builtins",
            "getattr",
        ):  # as Python 3.11.2 pickles a member of an enum
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}, which metadata does not need")


def _member(enum: object, name: str) -> Enum:
    """Return a member of an enum, of all things that have attributes."""
    if not (isinstance(enum, type) and issubclass(enum, Enum)):
        raise pickle.UnpicklingError("it asks for an attribute of something that is no enum")
    return enum[name]


def read_range(folder: Path, saved: SavedTensor, start: int, numel: int) -> Tensor:
    """Return elements of a saved tensor as a flat one on the CPU; raise FormatError when they cannot be read."""
    return read_ranges(folder, saved, [(start, start + numel)])


def read_ranges(folder: Path, saved: SavedTensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Return the elements of ranges [start, stop) of a saved tensor, one behind the other, as `read_range` does."""
    elements = torch.empty(sum(b - a for a, b in ranges), dtype=getattr(torch, saved.dtype))
    at = 0
    for box in boxes_of_ranges(saved.shape, ranges):
        _fill(elements[at : at + box.numel].view(box.sizes), folder, saved, box)
        at += box.numel
    return elements


def read_box(folder: Path, saved: SavedTensor, box: Box) -> Tensor:
    """Return a box of a saved tensor on the CPU; raise FormatError when it cannot be read."""
    tensor = torch.empty(box.sizes, dtype=getattr(torch, saved.dtype))
    _fill(tensor, folder, saved, box)
    return tensor


def _fill(target: Tensor, folder: Path, saved: SavedTensor, box: Box) -> None:
    missing = box.numel
    for piece in saved.boxes:
        common = box.overlap(piece.box)
        if common is not None:
            target[common.within(box)] = _load(folder, piece)[common.within(piece.box)]
            missing -= common.numel
    if missing:
        raise FormatError(f"{folder}: {missing} elements are missing; take another checkpoint")


def _load(folder: Path, piece: SavedBox) -> torch.Tensor:
    """Return a box as it lies in a file, which is read by `weights_only`."""
    path = folder / piece.file
    try:
        with path.open("rb") as file:
            file.seek(piece.at)
            data = io.BytesIO(file.read(piece.nbytes))
        _check_sums(data, piece.checksum)
        content = torch.load(data, map_location="cpu", weights_only=True)
    except OSError as e:
        raise JobError(
            unread("the checkpoint file", path, e, "all machines of a run must see it")
        ) from None
    except (*BROKEN, RuntimeError, BadZipFile) as e:
        said = next(iter(str(e).splitlines()), type(e).__name__)
        raise FormatError(
            f"{path} does not hold {piece.key} as it was written ({said:.200}); take another checkpoint"
        ) from None
    if (
        not isinstance(content, torch.Tensor)
        or content.dtype != getattr(torch, piece.dtype)
        or tuple(content.shape) != piece.sizes
    ):
        raise FormatError(
            f"{path} does not hold {piece.key} as the metadata says; take another checkpoint"
        )
    return content


def _check_sums(data: io.BytesIO, expected: int | None) -> None:
    """Raise ValueError if bytes that torch.save wrote have changed, or belong to another checkpoint.

    torch.load does not look at checksums.
    """
    if is_zipfile(data):
        with ZipFile(data) as archive:
            if (changed := archive.testzip()) is not None:
                raise ValueError(f"the checksum of {changed} is another one")
            if expected not in (
                None,
                *(
                    record.CRC
                    for record in archive.infolist()
                    if record.filename.endswith("/data/0")
                ),
            ):
                raise ValueError(
                    "the file is of another step, rank or run than complete.json; copy the whole folder again"
                )
    data.seek(0)


@dataclass(frozen=True)
class DcpTensor:
    """Hold a tensor of a DCP as one that is read by boxes."""

    folder: str
    saved: SavedTensor

    @property
    def dtype(self) -> torch.dtype:
        torch_dtype: torch.dtype = getattr(torch, self.saved.dtype)
        return torch_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.saved.shape

    def flat(self, start: int, stop: int) -> Tensor:
        """Return some elements of the row-major tensor."""
        return read_range(Path(self.folder), self.saved, start, stop - start)

    def flats(self, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Return the elements of some ranges [start, stop) of the row-major tensor, one behind the other."""
        return read_ranges(Path(self.folder), self.saved, ranges)

    def box(self, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Return a box of the tensor."""
        return read_box(Path(self.folder), self.saved, Box(starts, sizes))


WEIGHTS = "model."
"""The beginning of the names of weights, as torch's own training loops and Piper write them."""


def dcp_tensors(folder: Path) -> dict[str, DcpTensor]:
    """Return the weights of a DCP by name; if names begin with "model.", only these, without that beginning.

    Raises FormatError for metadata that were changed, and JobError for a folder that cannot be read.
    """
    path = folder / DCP_METADATA
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        sizes = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
    except OSError as e:
        raise JobError(unread("the checkpoint file", path, e, "take another checkpoint")) from None
    if len(data) > MOST_BYTES:
        raise FormatError(f"{path} is larger than any file of this kind; take another checkpoint")
    tensors = read_metadata(data, str(path))
    for key, tensor in tensors.items():
        if problem := unreadable(tensor, sizes):
            raise FormatError(
                f"{folder}: the metadata {problem} for {key}; take another checkpoint"
            )
    return weights_in(folder, tensors)


def weights_in(folder: Path, found: Mapping[str, SavedTensor]) -> dict[str, DcpTensor]:
    """Return the weights among the tensors of a DCP by name, as `dcp_tensors` does."""
    named = {
        key.removeprefix(WEIGHTS): DcpTensor(str(folder), t)
        for key, t in found.items()
        if key.startswith(WEIGHTS)
    }
    return named or {key: DcpTensor(str(folder), t) for key, t in found.items()}


def unreadable(tensor: SavedTensor, sizes: Mapping[str, int]) -> str:
    """Return the problem with a tensor's places, given the sizes of files; an empty text if there is none."""
    elements = 0
    for saved in tensor.boxes:
        if (
            saved.file not in sizes
            or saved.at < 0
            or saved.nbytes < 0
            or saved.at + saved.nbytes > sizes[saved.file]
        ):
            return f"names bytes that no file of the checkpoint has ({saved.file!r:.80})"
        elements += saved.box.numel
    return (
        "" if elements == prod(tensor.shape) else f"has {elements} of {prod(tensor.shape)} elements"
    )
