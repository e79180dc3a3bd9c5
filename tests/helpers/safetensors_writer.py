"""Write safetensors files and Hugging Face folders, as data for tests of the reader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, uint8

from piper_runtime.weights.safetensors_file import STORED_DTYPES

NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


def raw(tensor: Tensor) -> bytes:
    return (
        bytes(tensor.detach().contiguous().reshape(-1).view(uint8).tolist())
        if tensor.numel()
        else b""
    )


def header_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    return entries


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write a file; the header is filled up to a multiple of 8 bytes with spaces, as the format's own writer does."""
    free = {"__metadata__": dict(metadata)} if metadata else {}
    text = json.dumps(free | header_of(tensors)).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(map(raw, tensors.values())))
    return path


def write_folder(folder: Path, tensors: Mapping[str, Tensor], shards: int = 2) -> Path:
    """Write shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [f"model-{k + 1:05}-of-{shards:05}.safetensors" for k in range(shards)]
    where = {name: files[k % shards] for k, name in enumerate(tensors)}
    for file in files:
        write_safetensors(
            folder / file, {n: tensors[n] for n, f in where.items() if f == file}, {"format": "pt"}
        )
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": where,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
