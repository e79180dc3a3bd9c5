"""Output that nobody reads any more: `piper ... | head` closes its end of the pipe while the command works.

A training or a search must neither end nor lose its results because of that. What is printed afterwards goes nowhere.
"""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

from piper_ir.errors import OutputError


class OutputStream:
    """A text stream that may lose its reader. What is not defined here is the stream's own."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        """Write text. OutputError when it cannot be written, but for a pipe that is closed."""
        try:
            return self._stream.write(text)
        except OSError as e:
            return self._lost(e, len(text))

    def flush(self) -> None:
        """Bring what was written to where it belongs. OutputError as for `write`."""
        try:
            self._stream.flush()
        except OSError as e:
            self._lost(e, 0)

    def _lost(self, error: OSError, written: int) -> int:
        """Write to nowhere from now on.

        That holds also for what is still in the stream's buffer, which the interpreter flushes at its end.
        """
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if isinstance(error, BrokenPipeError):
            return written
        raise OutputError(f"cannot write to {self._name}: {error.strerror}") from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_output() -> None:
    """Prepare stdout and stderr for the command.

    A stream that the shell has closed (`>&-`) becomes one that goes nowhere.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # else the first file that is opened would be the command's stdout
            os.open(os.devnull, os.O_RDWR)
    for name, number, title in (("stdout", 1, "standard output"), ("stderr", 2, "standard error")):
        stream = getattr(sys, name) or os.fdopen(number, "w", closefd=False)
        setattr(sys, name, OutputStream(stream, title))
