"""Read safetensors files, a box of a tensor at a time.

A file is 8 bytes with the length of the header (little-endian), the header (JSON: for each name dtype, shape, and begin
and end of its bytes), and the bytes of all tensors, row-major and without gaps:
https://github.com/huggingface/safetensors. Nothing but the header and the boxes that are asked for is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piper_ir.ground.errors import JobError

STORED_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "I16": torch.int16, "U16": torch.uint16, "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
}  # fmt: skip
"""The dtypes of safetensors files by their names there."""
LENGTH = 8
"""The bytes of the length of the header, at the beginning of a file."""
LONGEST_HEADER = 100_000_000
"""The most bytes of a header, as the format has it."""
FREE_TEXT = "__metadata__"
"""The name in a header that is no tensor's."""


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
            f"{path} cannot be read: {error.strerror}; every machine of a run needs it under this "
            f"path"
        ) from error


def read_header(path: str | Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name; raise JobError, with the path, for anything that is not one."""
    return read_headers(path)[0]


def read_headers(path: str | Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors and the texts of a safetensors file, each by name; raise JobError as `read_header`."""
    path = str(path)
    try:
        size = Path(path).stat().st_size
        if size < LENGTH:
            raise _Broken(f"has {size} bytes, and the length of its header alone takes {LENGTH}")
        first = bytearray(LENGTH)
        read_bytes(path, [(0, LENGTH)], memoryview(first))
        length = int.from_bytes(first, "little")
        if length > min(size - LENGTH, LONGEST_HEADER):
            raise _Broken(
                f"says that its header has {length} bytes; the file has {size}, and a header at "
                f"most {LONGEST_HEADER}"
            )
        raw = bytearray(length)
        read_bytes(path, [(LENGTH, length)], memoryview(raw))
        header = _parsed(bytes(raw))
        texts = _texts(header.pop(FREE_TEXT, {}))
        return _tensors(path, header, LENGTH + length, size), texts
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from error
    except _Broken as error:
        raise JobError(f"{path} is no safetensors file: it {error}") from None


class _Broken(Exception):
    """Report the problem of a broken file, as the end of a sentence."""


def _parsed(header: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise _Broken("has a name twice in its header")
        return found

    try:
        found = json.loads(header.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _Broken(f"has a header that is no JSON ({type(error).__name__}: {error})") from None
    if not isinstance(found, dict):
        raise _Broken("has a header that is no JSON object")
    return found


def _tensors(path: str, header: dict[str, Any], begin: int, size: int) -> dict[str, StoredTensor]:
    spans: list[tuple[int, int, str]] = []
    found: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        dtype, shape, start, stop = _entry(name, entry)
        bytes_needed = math.prod(shape) * dtype.itemsize
        if stop - start != bytes_needed:
            raise _Broken(
                f"gives {name!r} {stop - start} bytes; {dtype} of shape {list(shape)} needs "
                f"{bytes_needed}"
            )
        found[name] = StoredTensor(path, dtype, shape, begin + start)
        spans.append((start, stop, name))
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            raise _Broken(
                f"has its tensors overlap, or a gap: {name!r} begins at byte {start}, and the one "
                f"before it ends at "
                f"{end}"
            )
        end = stop
    if begin + end != size:
        raise _Broken(
            f"has {size - begin} bytes of tensors, and its header describes {end}: it was cut off, "
            f"or something follows"
        )
    return found


def _texts(entry: Any) -> dict[str, str]:
    if not isinstance(entry, dict) or not all(isinstance(text, str) for text in entry.values()):
        raise _Broken(f"has {FREE_TEXT} that is no object of texts")
    return entry


def _entry(name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Return dtype, shape, begin and end of one tensor of a header."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _Broken(f"describes {name!r} by something else than dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in STORED_DTYPES:
        raise _Broken(f"has {name!r} in dtype {dtype!r}; known are {', '.join(STORED_DTYPES)}")
    if not _are_sizes(shape):
        raise _Broken(
            f"gives {name!r} the shape {shape!r}; a list of integers of at least 0 is needed"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _Broken(
            f"gives {name!r} the data_offsets {offsets!r}; begin and end of its bytes are needed"
        )
    return STORED_DTYPES[dtype], tuple(shape), offsets[0], offsets[1]


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
