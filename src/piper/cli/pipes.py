"""Survive output that nobody reads any more: `piper ... | head` closes its end of the pipe while the command works.

A training or a search must neither end nor lose its results because of that. Later output is dropped.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO

from piper_ir.ground.errors import OutputError


class OutputStream:
    """Wrap a text stream that may lose its reader; everything not defined here is the stream's own."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        """Write text; raise OutputError when it cannot be written, except to a closed pipe."""
        try:
            return self._stream.write(text)
        except OSError as e:
            return self._lost(e, len(text))

    def flush(self) -> None:
        """Flush the stream; raise OutputError as `write` does."""
        try:
            self._stream.flush()
        except OSError as e:
            self._lost(e, 0)

    def _lost(self, error: OSError, written: int) -> int:
        """Drop all output from now on, also the content of the stream's buffer, which the interpreter flushes last."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if isinstance(error, BrokenPipeError):
            return written
        raise OutputError(f"cannot write to {self._name}: {error.strerror}") from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_answer: OutputStream | None = None
"""The standard output of a command with --json; nothing but `show_json` writes to it."""


def show_json(value: object) -> None:
    """Print a value as the JSON that a command was asked for."""
    show_json_text(json.dumps(value))


def show_json_text(text: str) -> None:
    """Print the JSON that a command was asked for."""
    print(text, file=_answer, flush=True)


def keep_for_json() -> None:
    """Keep standard output for `show_json`: prints of the user's code, also in worker processes, go to stderr."""
    global _answer
    kept = os.dup(1)
    os.dup2(2, 1)
    _answer = OutputStream(os.fdopen(kept, "w", encoding="utf-8", closefd=False), "standard output")


def open_output() -> None:
    """Prepare stdout and stderr for the command; a stream that the shell has closed (`>&-`) drops its output."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # else the first file that is opened would be the command's stdout
            os.open(os.devnull, os.O_RDWR)
    for name, number, title in (("stdout", 1, "standard output"), ("stderr", 2, "standard error")):
        stream = getattr(sys, name) or os.fdopen(number, "w", closefd=False)
        setattr(sys, name, OutputStream(stream, title))
