"""Write files of results."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file as a whole, or leave the old one in place; raise OSError when it cannot be written.

    A full disk neither destroys an older file nor leaves half of a new one. Links are followed.
    """
    special = (
        path.exists() and not path.is_file()
    )  # /dev/stdout, a pipe, a folder: nothing that could be replaced
    target = path if special else Path(os.path.realpath(path))
    unfinished = target if special else target.with_name(f"{target.name}.unfinished")
    try:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        if not special:
            unfinished.replace(target)
    except BaseException:  # an interrupt leaves no half either
        if not special:
            with suppress(OSError):  # it may not be there; the first error is what matters
                unfinished.unlink()
        raise


ROOM = 1 << 20
"""The bytes for which a file must have room, so that a full disk is noticed before the work and not after it."""


def check_writable(path: Path) -> None:
    """Raise OSError when `write_whole` could not write a file here now; an existing file stays as it is."""
    if path.exists() and not path.is_file():
        with path.open("ab"):
            return
    target = Path(os.path.realpath(path))
    trial = target.with_name(f"{target.name}.unfinished")
    try:
        with trial.open("wb") as file:
            file.write(bytes(ROOM))
    finally:
        with suppress(OSError):
            trial.unlink()
