"""Say in words why a file cannot be read, in place of Python's "[Errno 2] No such file or directory"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from piper_ir.ground.errors import JobError

_WORDS = {
    FileNotFoundError: "there is no such file",
    IsADirectoryError: "it is a folder",
    NotADirectoryError: "a part of its path is a file and no folder",
    PermissionError: "this user may not read it",
}


def unread(what: str, path: str | Path, error: OSError | ValueError, advice: str) -> str:
    """Return the message for a file that cannot be read: its kind and path, why in words, and how to go on."""
    shown = path if str(path) else "''"
    return f"cannot read {what} {shown}: {why_unread(error)}; {advice}"


def why_unread(error: OSError | ValueError) -> str:
    """Return why a file cannot be read, in words that fit behind its path and a colon."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text at byte {error.start}"
    if not isinstance(error, OSError):
        return f"no file can have this name ({error})"  # Python refuses a NUL in a path
    words = (text for kind, text in _WORDS.items() if isinstance(error, kind))
    return next(words, error.strerror or str(error))


def json_fields(text: str, path: str | Path, needed: str) -> dict[str, Any]:
    """Return the fields of a JSON object; raise JobError, with the file and the accepted form, for other text."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise JobError(f"{path} is no JSON: {e}") from None
    if not isinstance(fields, dict):
        raise JobError(f"{path} holds a {type(fields).__name__}; {needed} is needed")
    return fields
