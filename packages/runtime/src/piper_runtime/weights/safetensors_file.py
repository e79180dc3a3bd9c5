"""Read safetensors files, a box of a tensor at a time.

A file is 8 bytes with the length of the header (little-endian), the header, and the bytes of all tensors, row-major and
without gaps: https://github.com/huggingface/safetensors. The format's library reads and checks the header. Boxes are
read here, since the library reads whole tensors, or maps the file: if a mapped file is cut off, its readers are killed
(decision 36).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from piper_ir.ground.errors import JobError
from piper_ir.tools import unread

STORED_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "I16": torch.int16, "U16": torch.uint16, "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
}  # fmt: skip
"""The dtypes of safetensors files by their names there."""
LENGTH = 8
"""The bytes of the length of the header, at the beginning of a file."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Describe a tensor in a file, whose bytes begin at `start`."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def flat(self, start: int, stop: int) -> Tensor:
        """Return the elements from `start` to `stop` of the row-major tensor."""
        return self._read([(start, stop)])

    def box(self, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Return a box of the tensor: in each dimension `sizes` entries from `starts`."""
        return self._read(runs(self.shape, starts, sizes)).view(sizes)

    def _read(self, spans: Iterable[tuple[int, int]]) -> Tensor:
        """Return the elements of some spans, one after the other."""
        spans, width = list(spans), self.dtype.itemsize
        raw = bytearray(width * sum(stop - start for start, stop in spans))
        read_bytes(
            self.path,
            [(self.start + width * a, width * (b - a)) for a, b in spans],
            memoryview(raw),
        )
        return torch.frombuffer(raw, dtype=self.dtype) if raw else torch.empty(0, dtype=self.dtype)


def runs(
    shape: tuple[int, ...], starts: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    """Yield the spans of elements, as long as possible, that a box takes of a row-major tensor, in their order."""
    inner = len(shape)  # dimensions from here on are contiguous in the box
    while inner > 0 and (inner == len(shape) or sizes[inner] == shape[inner]):
        inner -= 1
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    length = math.prod(sizes[inner:])
    begin = sum(a * s for a, s in zip(starts, strides))
    if length:
        for index in product(*(range(n) for n in sizes[:inner])):
            first = begin + sum(i * s for i, s in zip(index, strides))
            yield first, first + length


def read_bytes(path: str, spans: Iterable[tuple[int, int]], into: memoryview) -> None:
    """Read spans (first byte, length) of a file into a buffer, one after the other.

    Raises JobError when the file cannot be read, or is shorter than it was when its header was read.
    """
    done = 0
    try:
        with open(path, "rb", buffering=0) as file:
            for offset, length in spans:
                file.seek(offset)
                end = done + length
                while done < end:
                    count = file.readinto(into[done:end])
                    if not count:
                        raise JobError(
                            f"{path} ends early: it was changed after its header was read"
                        )
                    done += count
    except OSError as error:
        raise JobError(
            unread("the weights", path, error, "every machine of a run needs them under this path")
        ) from error


def read_header(path: str | Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name; raise JobError, with the path, for anything that is not one."""
    return read_headers(path)[0]


def read_headers(path: str | Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors and the texts of a safetensors file, each by name; raise JobError as `read_header`."""
    path = str(path)
    try:
        with open(path, "rb") as file:
            start = LENGTH + int.from_bytes(file.read(LENGTH), "little")
        with safe_open(path, framework="pt", backend="pread") as header:
            described = [(name, header.get_slice(name)) for name in header.offset_keys()]
            texts: dict[str, str] = header.metadata() or {}
    except OSError as error:
        raise JobError(unread("the weights", path, error, "give a safetensors file")) from error
    except SafetensorError as error:
        raise JobError(f"{path} is no safetensors file: {error}") from None
    tensors: dict[str, StoredTensor] = {}
    for name, entry in described:  # in the order of their bytes, which have no gaps
        dtype, shape = STORED_DTYPES.get(entry.get_dtype()), tuple(entry.get_shape())
        if dtype is None:
            known = ", ".join(STORED_DTYPES)
            raise JobError(f"{path} has {name!r} in dtype {entry.get_dtype()}; known are {known}")
        tensors[name] = StoredTensor(path, dtype, shape, start)
        start += math.prod(shape) * dtype.itemsize
    return tensors, texts
