"""Keep Ctrl-C from being lost.

Python reports it by an exception wherever the program happens to be, and some places drop exceptions: importing torch
(which asks whether NumPy exists, and takes any exception for a no), finalizers, callbacks. The command would go on as
if nobody had asked it to stop.
"""

from __future__ import annotations

import os
import signal
import sys
from threading import Timer, main_thread
from types import FrameType
from typing import Any

INTERRUPTED = 130
"""The exit code of a command that was interrupted, as shells have it: 128 + SIGINT."""
TERMINATED = 128 + signal.SIGTERM
"""The exit code of a command that was asked to end, as a batch system does before it kills."""
AGAIN_S = 0.05
"""The seconds until an interrupt that was dropped is raised again."""


def hear() -> None:
    """Handle signals in the main thread of a command; signals that are ignored, as in a shell's background, stay so."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
        sys.unraisablehook = _dropped


def leave(code: int = INTERRUPTED) -> None:
    """End at once after an interrupt, when workers and Ray are ended.

    Ray's native threads may crash an interpreter whose raylet the same interrupt has ended, and the shell would report
    a segmentation fault.
    """
    if "ray" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _interrupted(number: int, frame: FrameType | None) -> None:
    if _importing("torch"):  # before there is anything to clean up
        os.write(2, b"piper: interrupted\n")
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt


def _terminated(number: int, frame: FrameType | None) -> None:
    """End as after an interrupt: workers and Ray are ended on the way out."""
    os.write(2, b"piper: ended by SIGTERM\n")
    if _importing("torch"):
        os._exit(TERMINATED)
    raise SystemExit(TERMINATED)


def _importing(name: str) -> bool:
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


def _dropped(what: Any) -> None:
    if not issubclass(what.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(what)
        return
    again = Timer(AGAIN_S, signal.pthread_kill, (main_thread().ident, signal.SIGINT))  # the one that may be asleep
    again.daemon = True
    again.start()
