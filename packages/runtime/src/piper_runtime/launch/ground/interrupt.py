"""Delay interrupts of a run in this process to the end of its step, since a half-done step is no result."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer, current_thread, main_thread
from types import FrameType

PATIENCE_S = 5.0
"""The longest delay of an interrupt, and the time that an interrupted run may take beside its remaining steps."""


@dataclass
class Interrupt:
    """Hold whether an interrupt was `asked` for."""

    asked: bool = False


@contextmanager
def at_step_end() -> Iterator[Interrupt]:
    """Hold back an interrupt inside the block, for PATIENCE_S at most; a second one goes through at once.

    If interrupts are ignored, or outside of the main thread, which alone receives them, nothing is held back.
    """
    before = signal.getsignal(signal.SIGINT)
    interrupt = Interrupt()
    if current_thread() is not main_thread() or not callable(before):
        yield interrupt
        return
    again = Timer(PATIENCE_S, signal.pthread_kill, (main_thread().ident, signal.SIGINT))
    again.daemon = True

    def heard(number: int, frame: FrameType | None) -> None:
        if interrupt.asked:
            before(number, frame)
        else:
            interrupt.asked = True
            again.start()

    signal.signal(signal.SIGINT, heard)
    try:
        yield interrupt
    finally:
        again.cancel()
        signal.signal(signal.SIGINT, before)
