"""Let interrupts of a run in this process wait for the end of its step: what a step leaves half done is no result."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer, current_thread, main_thread
from types import FrameType

PATIENCE_S = 5.0
"""How long an interrupt waits, and how long an interrupted run of processes may take beside the steps that it still
does."""


@dataclass
class Interrupt:
    """`asked`: whether somebody has interrupted the run."""

    asked: bool = False


@contextmanager
def at_step_end() -> Iterator[Interrupt]:
    """Hold back an interrupt inside the block, for PATIENCE_S at most; a second one goes through at once.

    Where interrupts are ignored, and outside of the main thread, which alone hears them, nothing is held back."""
    before = signal.getsignal(signal.SIGINT)
    found = Interrupt()
    if current_thread() is not main_thread() or not callable(before):
        yield found
        return
    again = Timer(PATIENCE_S, signal.pthread_kill, (main_thread().ident, signal.SIGINT))
    again.daemon = True

    def heard(number: int, frame: FrameType | None) -> None:
        if found.asked:
            before(number, frame)
        else:
            found.asked = True
            again.start()

    signal.signal(signal.SIGINT, heard)
    try:
        yield found
    finally:
        again.cancel()
        signal.signal(signal.SIGINT, before)
