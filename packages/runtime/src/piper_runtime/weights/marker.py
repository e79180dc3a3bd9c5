"""Mark a checkpoint as complete, with the list of its files.

The mark holds the size of each file, digests of the files that are read whole, and the checksum of each box of the
others. A box is compared with its checksum when it is read, so no file is read twice, neither to write nor to read it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from piper_ir.ground.codec import read_document
from piper_ir.ground.errors import FormatError, JobError
from piper_ir.tools import unread
from piper_runtime.weights.dcp_tensors import (
    DCP_METADATA,
    MOST_BYTES,
    SavedBox,
    SavedTensor,
    read_metadata,
    unreadable,
)

MARKER = "complete.json"
"""The file that is written last: only a folder that has it is a checkpoint. It lists the checkpoint's other files."""
META = "run.json"
MARKER_FORMAT, MARKER_VERSION = "piper-checkpoint-files", 1
AGAIN = "copy the whole folder again from where it was written, or take another checkpoint"


@dataclass(frozen=True)
class Marker:
    """Hold the content of `complete.json`; checkpoints of earlier versions have sizes alone.

    Attributes:
        files: the size of each file.
        digests: the digests of files that are read whole.
        checksums: of other files, the checksums of the boxes in them, in their order.
    """

    files: dict[str, int]
    digests: dict[str, str]
    checksums: dict[str, list[int]]
    step: int | None
    run: str


def digest_of(data: bytes) -> str:
    """Return a digest of a file's content."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def marked_tensors(path: Path) -> tuple[bytes, dict[str, SavedTensor]]:
    """Return the metadata of a checkpoint's run as bytes, and its tensors by name.

    Raises JobError when it is incomplete or not one of Piper's, and FormatError when a file is of another step or run.
    """
    marker = read_marker(path)
    described = {name: read_bytes(path / name) for name in (META, DCP_METADATA)}
    for name, digest in marker.digests.items():
        if digest_of(described[name]) != digest:
            raise FormatError(f"{path / name} {_does_not_belong(marker, described[META])}; {AGAIN}")
    tensors = read_metadata(described[DCP_METADATA], str(path / DCP_METADATA))
    for key, tensor in tensors.items():
        if problem := unreadable(tensor, marker.files):
            raise FormatError(f"{path}: the metadata {problem} for {key}; take another checkpoint")
    return described[META], _with_checksums(tensors, marker, path)


def _does_not_belong(marker: Marker, described: bytes) -> str:
    """Return that a file is not the one that was written, and its step and run, as far as they are known."""
    try:
        meta = json.loads(described)
        step, run = meta["step"], str(meta["run"])
    except (ValueError, KeyError, TypeError):
        step, run = marker.step, marker.run
    if (step, run) == (marker.step, marker.run):
        return f"was changed, or is not the one of step {marker.step} to which {MARKER} belongs"
    return (
        f"does not belong to {MARKER}: that is of step {marker.step} of run {marker.run:.8}, and {META} of step "
        f"{step} of run {run:.8}"
    )


def _with_checksums(
    tensors: Mapping[str, SavedTensor], marker: Marker, path: Path
) -> dict[str, SavedTensor]:
    """Return the tensors with the checksum of each box, which is compared when the box is read."""
    if not marker.checksums:
        return dict(tensors)
    places: dict[str, set[int]] = {}
    for box in (box for tensor in tensors.values() for box in tensor.boxes):
        places.setdefault(box.file, set()).add(box.at)
    sums: dict[tuple[str, int], int] = {}
    for name, offsets in places.items():
        expected = marker.checksums.get(name, [])
        if len(expected) != len(offsets):
            raise FormatError(
                f"{path / MARKER} has {len(expected)} checksums of {name}, which holds {len(offsets)} boxes; {AGAIN}"
            )
        sums |= {(name, at): sum for at, sum in zip(sorted(offsets), expected, strict=True)}
    return {
        key: replace(
            t, boxes=tuple(replace(box, checksum=sums[box.file, box.at]) for box in t.boxes)
        )
        for key, t in tensors.items()
    }


def read_marker(path: Path) -> Marker:
    """Return the mark of a complete checkpoint.

    Raises JobError or FormatError unless its files are all there, as long as they were written.
    """
    if not (path / MARKER).is_file():
        kind = (
            "is a checkpoint that was not completed"
            if (path / META).is_file()
            else "is no checkpoint of Piper's"
        )
        raise JobError(
            f"{path} {kind}: it has no {MARKER}; give another one, or resume='latest' for the newest complete one"
        )
    where = str(path / MARKER)
    document = read_document(
        MARKER_FORMAT, MARKER_VERSION, decoded(read_bytes(path / MARKER), path / MARKER), where
    )
    sizes, digests, checksums = (
        document.get(name, {}) for name in ("files", "digests", "checksums")
    )
    if not isinstance(sizes, dict) or not all(
        _is_file_name(n) and type(s) is int for n, s in sizes.items()
    ):
        raise FormatError(
            f"{where}: names of files with their sizes are expected; take another checkpoint"
        )
    if not isinstance(digests, dict) or not digests.keys() <= {META, DCP_METADATA}:
        raise FormatError(
            f"{where}: digests of {META} and {DCP_METADATA} are expected; take another checkpoint"
        )
    if not isinstance(checksums, dict) or not all(isinstance(s, list) for s in checksums.values()):
        raise FormatError(
            f"{where}: lists of checksums by file are expected; take another checkpoint"
        )
    for name, size in sizes.items():
        there = (path / name).stat().st_size if (path / name).is_file() else None
        if there != size:
            what = "is missing" if there is None else f"has {there} bytes"
            raise FormatError(f"{path / name} {what}, {size} bytes were written; {AGAIN}")
    for name in (META, DCP_METADATA):
        if name not in sizes:
            raise FormatError(f"{where} does not list {name}; take another checkpoint")
    return Marker(sizes, digests, checksums, document.get("step"), str(document.get("run", "")))


def _is_file_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and Path(name).name == name
        and name not in ("", ".", "..")
        and "\0" not in name
    )


def read_bytes(path: Path) -> bytes:
    """Return the content of a file that is read whole; raise JobError or FormatError if it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as e:
        raise JobError(unread("the checkpoint file", path, e, "take another checkpoint")) from None
    if len(data) > MOST_BYTES:
        raise FormatError(f"{path} is larger than any file of this kind; take another checkpoint")
    return data


def decoded(data: bytes, path: Path) -> str:
    """Return the text in a file's content; raise FormatError if it is no text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise FormatError(f"{path} is no text; take another checkpoint") from None


def marker_text(
    run: str,
    step: int,
    sizes: Mapping[str, int],
    described: Mapping[str, bytes],
    boxes: Iterable[SavedBox],
) -> str:
    """Return the content of the mark, which lists the files with their sizes.

    The files of `described` are read whole, and `boxes` lie in others.
    """
    places: dict[str, dict[int, int | None]] = {name: {} for name in sizes if name not in described}
    for box in boxes:
        if box.nbytes:
            places[box.file][box.at] = box.checksum
    marker = {
        "format": MARKER_FORMAT, "version": MARKER_VERSION, "run": run, "step": step, "files": sizes,
        "digests": {name: digest_of(content) for name, content in described.items()},
        "checksums": {name: [sums[at] for at in sorted(sums)] for name, sums in places.items()},
    }  # fmt: skip
    return json.dumps(marker, indent=1)
