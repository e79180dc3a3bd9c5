"""Write the metadata of torch's distributed checkpoints (DCP); `piper_runtime.weights.dcp_tensors` reads it."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from piper_runtime.checkpoint.rank_tensors import key_path
from piper_runtime.weights.dcp_tensors import SavedBox


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
            tensors[key].chunks.append(
                ChunkStorageMetadata(torch.Size(saved.offsets), torch.Size(saved.sizes))
            )
            index = MetadataIndex(key, saved.offsets, len(tensors[key].chunks) - 1)
            storage[index] = _StorageInfo(saved.file, saved.at, saved.nbytes)
    paths = {key: key_path(key) for key in tensors}
    return pickle.dumps(Metadata(tensors, paths, storage, version=CURRENT_DCP_VERSION))
