"""Show the name of slow work, such as a capture, while it runs: on a line of a terminal, or by lines in a pipe or file.

Nothing is shown until a command switches it on (`shown_while_working`): a library does not write anywhere itself.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from piper_ir.ground.errors import PiperError

PATIENCE_S = 2.0
"""The seconds after which a line appears."""
EVERY_S = 0.5
PIPE_EVERY_S = 10.0
"""The seconds between two lines in a pipe, whose reader sees no clock."""
CLEAR = "\r\x1b[K"


class _Line:
    """Show the current work on the last line of a terminal, from a thread of its own."""

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

    def name(self, text: str) -> None:
        """Name the innermost work otherwise, which goes on."""
        with self._lock:
            self._work[-1] = (text, self._work[-1][1])

    def _wipe(self) -> None:
        if self._drawn:
            self._stream.write(CLEAR)
            self._stream.flush()
            self._drawn = False

    def _run(self) -> None:
        while not self._ended.wait(min(EVERY_S, self._patience_s)):
            with self._lock:
                if self._work and time.monotonic() - self._work[0][1] >= self._patience_s:
                    self._say(*self._work[-1])

    def _say(self, text: str, begun: float) -> None:
        self._stream.write(f"{CLEAR}{text}, {time.monotonic() - begun:.0f} s")
        self._stream.flush()
        self._drawn = True


class _PlainLines(_Line):
    """Write a line every few seconds, and one for work that took that long."""

    def __init__(self, stream: TextIO, patience_s: float) -> None:
        super().__init__(stream, patience_s)
        self._last = time.monotonic()

    def pop(self) -> None:
        with self._lock:
            text, begun = self._work.pop()
            if time.monotonic() - begun >= self._patience_s:
                self._write(f"{text}: done in {time.monotonic() - begun:.0f} s")

    def _say(self, text: str, begun: float) -> None:
        if time.monotonic() - self._last >= self._patience_s:
            self._write(f"{text}, {time.monotonic() - begun:.0f} s so far")

    def _write(self, text: str) -> None:
        self._last = time.monotonic()
        with suppress(
            OSError, ValueError, PiperError
        ):  # nobody reads it any more, which must not end the work
            self._stream.write(f"{text}\n")
            self._stream.flush()


_LINES: list[_Line] = []
"""The line that is shown, if any."""


@contextmanager
def shown_while_working(
    stream: TextIO | None = None, patience_s: float = PATIENCE_S, pipe_s: float = PIPE_EVERY_S
) -> Iterator[None]:
    """Show the names of `working` inside of the `with`, on the stream (default: stderr), a terminal or not."""
    if _LINES:
        yield
        return
    target = sys.stderr if stream is None else stream
    line = _Line(target, patience_s) if target.isatty() else _PlainLines(target, pipe_s)
    _LINES.append(line)
    line.start()
    try:
        yield
    finally:
        _LINES.remove(line)
        line.end()


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Name the work inside of the `with`; the innermost name is shown, with its seconds.

    Yields a function that names it otherwise, such as "candidate 12 of 40".
    """
    line = _LINES[-1] if _LINES else None
    if line is None:
        yield lambda text: None
        return
    line.push(text)
    try:
        yield line.name
    finally:
        line.pop()


def clear_line() -> None:
    """Remove the line before something else is printed; it comes back below."""
    for line in _LINES:
        line.clear()
