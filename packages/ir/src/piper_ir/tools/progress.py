"""Say on a terminal what takes long, such as a capture, while it goes on.

Nothing is shown until a command switches it on (`shown_on_terminal`): a library does not write on a terminal itself.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

PATIENCE_S = 2.0
"""The seconds after which a line appears."""
EVERY_S = 0.5
CLEAR = "\r\x1b[K"


class _Line:
    """Show what is being done, on the last line of a terminal, from a thread of its own."""

    def __init__(self, stream: TextIO, patience_s: float) -> None:
        self._stream, self._patience_s = stream, patience_s
        self._work: list[tuple[str, float]] = []
        self._lock = threading.Lock()
        self._drawn = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="piper-progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self.clear()

    def push(self, text: str) -> None:
        with self._lock:
            self._work.append((text, time.monotonic()))

    def pop(self) -> None:
        with self._lock:
            self._work.pop()
            if not self._work:
                self._wipe()

    def clear(self) -> None:
        with self._lock:
            self._wipe()

    def _wipe(self) -> None:
        if self._drawn:
            self._stream.write(CLEAR)
            self._stream.flush()
            self._drawn = False

    def _run(self) -> None:
        while not self._ended.wait(min(EVERY_S, self._patience_s)):
            with self._lock:
                if self._work and time.monotonic() - self._work[0][1] >= self._patience_s:
                    text, begun = self._work[-1]
                    self._stream.write(f"{CLEAR}{text}, {time.monotonic() - begun:.0f} s")
                    self._stream.flush()
                    self._drawn = True


_LINES: list[_Line] = []
"""The line that is shown, if any."""


@contextmanager
def shown_on_terminal(stream: TextIO | None = None, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Show inside of the `with` what `working` names, where the stream (default: stderr) is a terminal."""
    target = sys.stderr if stream is None else stream
    if _LINES or not target.isatty():
        yield
        return
    line = _Line(target, patience_s)
    _LINES.append(line)
    line.start()
    try:
        yield
    finally:
        _LINES.remove(line)
        line.end()


@contextmanager
def working(text: str) -> Iterator[None]:
    """Name the work inside of the `with`; the line shows the innermost name, and its seconds."""
    line = _LINES[-1] if _LINES else None
    if line is None:
        yield
        return
    line.push(text)
    try:
        yield
    finally:
        line.pop()


def clear_line() -> None:
    """Remove the line before something else is printed; it comes back below."""
    for line in _LINES:
        line.clear()
