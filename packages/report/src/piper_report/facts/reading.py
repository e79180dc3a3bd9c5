"""Read the files of a result folder: whole texts, lines, and objects whose fields are checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from piper_ir.ground.codec import decode
from piper_ir.ground.errors import FormatError
from piper_ir.tools import unread

T = TypeVar("T")


def text_of(path: Path) -> str:
    """Return the text of a file; raise FormatError if it cannot be read."""
    with _readable(str(path)):
        return path.read_text(encoding="utf-8")


def lines_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each line that is not empty with its place for errors, one at a time: a long run has a large file."""
    with _readable(str(path)), path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                with _readable(where):
                    text = line.decode("utf-8")
                yield text, where


@contextmanager
def _readable(where: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as e:
        advice = "the command that wrote it can write it again"
        raise FormatError(unread("the results", where, e, advice)) from None


def checked(kind: type[T], data: Any, where: str) -> T:
    """Return a dataclass from a JSON object; unknown keys are ignored, and all others are checked."""
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]  # every caller gives a dataclass
    record = a_mapping(data, where)
    absent = [
        n
        for n, f in known.items()
        if n not in record and f.default is MISSING and f.default_factory is MISSING
    ]
    if absent:
        raise FormatError(f"{where}: lacks {', '.join(absent)}")
    instance: T = decode(kind, {k: v for k, v in record.items() if k in known}, where)
    return instance


def a_mapping(data: Any, where: str) -> Mapping[str, Any]:
    """Return a JSON object; raise FormatError for anything else."""
    if not isinstance(data, dict):
        raise FormatError(f"{where}: a JSON object is expected")
    return data
