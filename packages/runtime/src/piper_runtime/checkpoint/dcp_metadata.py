"""Write and read the metadata of torch's distributed checkpoints (DCP), a pickle that is read without trust.

torch unpickles it, which runs whatever a stranger has written into it. Here an unpickler makes the classes of DCP's
metadata only, and what it made is checked before it is used.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from piper_ir.errors import FormatError
from piper_ops import dtype_name
from piper_runtime.checkpoint.boxes import Box
from piper_runtime.checkpoint.rank_file import SavedBox
from piper_runtime.checkpoint.rank_tensors import key_path

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
    pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError, OverflowError,
    MemoryError, RecursionError, NotImplementedError,
)  # fmt: skip
"""The errors of reading a pickle that is truncated, or that somebody has made up."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Say where a checkpoint holds a tensor: in boxes that cover it."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[SavedBox, ...]


def metadata_bytes(boxes: Iterable[SavedBox], aliases: Mapping[str, str]) -> bytes:
    """Return the metadata of a checkpoint with these boxes; `aliases` maps further names of tensors to the first."""
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    others: dict[str, list[str]] = {}
    for other, first in aliases.items():
        others.setdefault(first, []).append(other)
    for saved in boxes:
        for key in (saved.key, *others.get(saved.key, ())):
            if key not in tensors:
                properties = TensorProperties(dtype=getattr(torch, saved.dtype))
                tensors[key] = TensorStorageMetadata(properties, torch.Size(saved.shape), [])
            tensors[key].chunks.append(ChunkStorageMetadata(torch.Size(saved.offsets), torch.Size(saved.sizes)))
            index = MetadataIndex(key, saved.offsets, len(tensors[key].chunks) - 1)
            storage[index] = _StorageInfo(saved.file, saved.at, saved.nbytes)
    paths = {key: key_path(key) for key in tensors}
    return pickle.dumps(Metadata(tensors, paths, storage, version=CURRENT_DCP_VERSION))


def read_metadata(data: bytes, where: str) -> dict[str, SavedTensor]:
    """Return the tensors that the metadata of a checkpoint describes, by name; `where` names it in messages.

    Raises FormatError for bytes that are no such metadata, or that describe what cannot be.
    """
    try:
        found = _Unpickler(io.BytesIO(data)).load()
        tensors, storage = found.state_dict_metadata, found.storage_data
        if type(found).__name__ != "Metadata" or not isinstance(tensors, dict) or not isinstance(storage, dict):
            raise ValueError("it describes no checkpoint")
        chunks = {(index.fqn, tuple(index.offset or ())): info for index, info in storage.items()}
        return {key: _tensor(key, tensor, chunks) for key, tensor in tensors.items() if not _is_bytes(tensor)}
    except BROKEN as e:
        raise FormatError(
            f"{where} is no metadata of a checkpoint, or was changed ({e or type(e).__name__}); take another checkpoint"
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
        if not (isinstance(info.relative_path, str) and type(info.offset) is type(info.length) is int):
            raise ValueError(f"{key!r:.80} has a piece in no file")
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{key!r:.80} was written by an extension ({info.transform_descriptors!r:.80})")
        boxes.append(SavedBox(key, name, sizes, box.offsets, box.sizes, info.relative_path, info.offset, info.length))
    return SavedTensor(name, sizes, tuple(boxes))


def _numbers(size: Any) -> tuple[int, ...]:
    if not isinstance(size, tuple) or not all(type(n) is int and n >= 0 for n in size):
        raise ValueError(f"{size!r:.80} is no shape")
    return tuple(size)


class _Unpickler(pickle._Unpickler):
    """Make objects of known classes only.

    It is the one in Python: that in C makes room for as many objects as a stranger claims.
    """

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which metadata does not need")
