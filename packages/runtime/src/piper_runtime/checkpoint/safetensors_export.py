"""Write safetensors files, a tensor at a time; `piper_runtime.weights.safetensors_file` reads them.

The format's library writes only files whose tensors are all in memory.
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

from piper_ir.ground.errors import JobError
from piper_runtime.weights.safetensors_file import LENGTH, STORED_DTYPES

ALIGNMENT = 8
"""The multiple of bytes that a header is padded to."""
FREE_TEXT = "__metadata__"
"""The name in a header that is no tensor's."""
_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class ToWrite:
    """Describe a tensor to write, whose elements `read` returns as a flat one when it is its turn."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def write_safetensors(path: Path, tensors: Sequence[ToWrite], texts: Mapping[str, str]) -> None:
    """Write tensors as one file, one at a time; raise JobError for a dtype that the format lacks."""
    ordered = sorted(
        tensors, key=lambda t: (-t.dtype.itemsize, t.name)
    )  # so that each lies at a multiple of its item
    header: dict[str, Any] = {FREE_TEXT: dict(texts)}
    end = 0
    for t in ordered:
        if t.dtype not in _NAMES:
            raise JobError(
                f"{t.name} is {t.dtype}, which safetensors files do not know; known are {', '.join(STORED_DTYPES)}"
            )
        begin, end = end, end + math.prod(t.shape) * t.dtype.itemsize
        header[t.name] = {
            "dtype": _NAMES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [begin, end],
        }
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
