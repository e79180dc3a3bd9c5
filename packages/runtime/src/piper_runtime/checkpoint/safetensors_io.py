"""Write and read safetensors files: 8 bytes with the length of a header, the header as JSON, and the bytes of tensors.

The header has for each tensor its dtype, shape, and where its bytes begin and end behind the header; they lie
row-major, without gaps. Under "__metadata__" it has texts by name. https://github.com/huggingface/safetensors describes
it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from piper_ir.codec import unique_keys
from piper_ir.errors import FormatError, JobError

LENGTH, ALIGNMENT = 8, 8
TEXTS = "__metadata__"
MOST_HEADER = 100_000_000
"""The most bytes of a header, as the format has it."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""The dtypes by the names that the format gives them."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class ToWrite:
    """Describe a tensor to write, whose elements `read` returns as a flat one when it is its turn."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def write_safetensors(path: Path, tensors: Sequence[ToWrite], texts: Mapping[str, str]) -> None:
    """Write tensors as one file, one at a time; raise JobError for a dtype that the format lacks."""
    ordered = sorted(tensors, key=lambda t: (-t.dtype.itemsize, t.name))  # so that each lies at a multiple of its item
    header: dict[str, Any] = {TEXTS: dict(texts)}
    end = 0
    for t in ordered:
        if t.dtype not in _NAMES:
            raise JobError(f"{t.name} is {t.dtype}, which safetensors files do not know; known are {', '.join(DTYPES)}")
        begin, end = end, end + math.prod(t.shape) * t.dtype.itemsize
        header[t.name] = {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(len(text).to_bytes(LENGTH, "little") + text)
            for t in ordered:
                file.write(t.read().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class FilePart:
    """Say where a tensor lies in a safetensors file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int

    def read(self) -> torch.Tensor:
        """Return its elements as a flat tensor; raise FormatError when the file is shorter than it was."""
        size = math.prod(self.shape) * self.dtype.itemsize
        with self.path.open("rb") as file:
            file.seek(self.at)
            data = bytearray(file.read(size))
        if len(data) != size:
            raise FormatError(f"{self.path} ends early; take another copy of the file")
        return torch.frombuffer(data, dtype=self.dtype) if size else torch.empty(0, dtype=self.dtype)


def read_safetensors(path: Path) -> tuple[dict[str, FilePart], dict[str, str]]:
    """Return where the tensors of a file lie, by name, and its texts; only the header is read.

    Raises JobError for a file that is not there, and FormatError for one that is no safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH), "little")
            if size < LENGTH or length > min(size - LENGTH, MOST_HEADER):
                raise FormatError(f"{path} is no safetensors file: its header would be longer than the file")
            text = file.read(length)
    except OSError as e:
        raise JobError(f"{path} cannot be read: {e.strerror}; give a safetensors file") from None
    try:
        header = json.loads(text.decode(), object_pairs_hook=unique_keys)
        return _parts(path, header, LENGTH + length, size)
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError) as e:
        raise FormatError(f"{path} is no safetensors file ({str(e).splitlines()[0]:.200}); take another copy of it") from None


def _parts(path: Path, header: dict[str, Any], begin: int, size: int) -> tuple[dict[str, FilePart], dict[str, str]]:
    texts = header.pop(TEXTS, {})
    if not all(isinstance(value, str) for value in texts.values()):
        raise ValueError(f"{TEXTS} holds something else than texts")
    parts, spans = {}, []
    for name, entry in header.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"} or entry["dtype"] not in DTYPES:
            raise ValueError(f"{name!r:.80} is described by something else than a known dtype, shape and data_offsets")
        dtype, shape, offsets = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in [*shape, *offsets]) or len(offsets) != 2:
            raise ValueError(f"{name!r:.80} has sizes that are no numbers")
        if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name!r:.80} has {offsets[1] - offsets[0]} bytes, which are not those of its shape {shape!r:.80}")
        parts[name] = FilePart(path, dtype, tuple(shape), begin + offsets[0])
        spans.append((offsets[0], offsets[1]))
    end = 0
    for first, last in sorted(spans):
        if first != end:
            raise ValueError("its tensors overlap, or have gaps between them")
        end = last
    if begin + end != size:
        raise ValueError(f"its tensors are {end} bytes, and the file has {size - begin}")
    return parts, texts
