"""Write tensors as torch.save does, without its work in Python for each of them.

A tensor is saved while the rank trains on, and Python runs one thread at a time. All archives of tensors of one dtype
and shape differ in the tensor's bytes and their checksum alone. So torch.save makes one of them, of zeros, and the
others are put together from it. (An archive's identity, which nothing reads, stays the zeros' one.)
"""

from __future__ import annotations

import ctypes
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import IO
from zipfile import ZipFile

import torch

LOCAL_CRC, CENTRAL_CRC = 14, 16
"""The places of the checksum in the two headers that a zip file has of a record."""
NAME_LENGTH, EXTRA_LENGTH, LOCAL_HEADER, CENTRAL_HEADER = 26, 28, 30, 46
"""The places of two lengths in a local header, and the lengths of both headers without names and extra fields."""
KINDS = 4096
"""The number of different dtypes and shapes whose archives are kept."""


@dataclass(frozen=True)
class Archive:
    """Hold the bytes before and after a tensor's own in its archive, and the places of their checksum in these."""

    head: bytes
    tail: bytes
    local: int
    central: int

    def write(self, file: IO[bytes], content: memoryview) -> int:
        """Write the archive with these bytes; return their checksum."""
        checksum = zlib.crc32(content)
        crc = checksum.to_bytes(4, "little")
        file.write(self.head[: self.local] + crc + self.head[self.local + 4 :])
        file.write(content)
        file.write(self.tail[: self.central] + crc + self.tail[self.central + 4 :])
        return checksum


@lru_cache(KINDS)
def archive_of(dtype: torch.dtype, sizes: tuple[int, ...]) -> Archive:
    """Return the archive of a contiguous tensor on the CPU, by its dtype and shape."""
    buffer = io.BytesIO()
    with _checksums():
        torch.save(torch.zeros(sizes, dtype=dtype), buffer)
    data = buffer.getvalue()
    with ZipFile(buffer) as file:
        (record,) = [r for r in file.infolist() if r.filename.endswith("/data/0")]
        central = data.index(record.filename.encode(), file.start_dir) - CENTRAL_HEADER
    at = record.header_offset
    name, extra = (
        int.from_bytes(data[at + p : at + p + 2], "little") for p in (NAME_LENGTH, EXTRA_LENGTH)
    )
    begin = at + LOCAL_HEADER + name + extra
    end = begin + record.file_size
    return Archive(data[:begin], data[end:], at + LOCAL_CRC, central + CENTRAL_CRC - end)


def write_tensor(file: IO[bytes], tensor: torch.Tensor) -> tuple[int, int]:
    """Write a contiguous tensor on the CPU, or a view of one, as its archive.

    Returns the number of bytes of the archive, and a checksum of the tensor's bytes.
    """
    archive = archive_of(tensor.dtype, tuple(tensor.shape))
    checksum = archive.write(file, bytes_of(tensor))
    return len(archive.head) + tensor.nbytes + len(archive.tail), checksum


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


@contextmanager
def _checksums() -> Iterator[None]:
    """Let torch.save write checksums, so that a changed file is noticed when it is read."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
