"""Keep Ctrl-C from being lost, and end in time when a batch system asks for it.

Python reports it by an exception wherever the program happens to be, and some places drop exceptions: importing torch
(which asks whether NumPy exists, and takes any exception for a no), finalizers, callbacks. The command would go on as
if nobody had asked it to stop.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from threading import Thread, Timer, main_thread
from types import FrameType
from typing import Any

INTERRUPTED = 130
"""The exit code of a command that was interrupted, as shells have it: 128 + SIGINT."""
TERMINATED = 128 + signal.SIGTERM
"""The exit code of a command that was asked to end, as a batch system does before it kills."""
AGAIN_S = 0.05
"""The seconds until an interrupt that was dropped is raised again."""


END_S, IN_ORDER_S = 5.0, 25.0
"""The seconds until a command ends after SIGTERM that its main thread has not heard, and after one that it has.

Batch systems kill after 10 to 30; until then a run finishes its step and saves, and a search shows its best.
"""
IN_NATIVE_CODE = ("piper rank", "piper store")
"""The names of threads that may wait in native code for a peer that is gone, as under torchrun."""


class _Terminated(KeyboardInterrupt, SystemExit):
    """Ask to end as Ctrl-C does, with the exit code of SIGTERM where nobody answers."""

    code = TERMINATED


class _Asked:
    """Hold whether SIGTERM was heard: a plain flag, since a handler that takes a lock may interrupt itself."""

    terminated = False


def hear() -> None:
    """Handle signals in the main thread of a command; signals that are ignored, as in a shell's background, stay so."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)
        _end_in_time()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
        sys.unraisablehook = _dropped


def leave(code: int = INTERRUPTED) -> None:
    """End at once if native threads could crash an interpreter that is taken down; then all else is ended.

    Threads of Ray may, whose raylet the same interrupt has ended, and the thread of a rank under torchrun, which wakes
    up when its peers are gone. The shell would report a segmentation fault or SIGABRT.
    """
    if "ray" in sys.modules or left_in_native_code():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def is_terminated() -> bool:
    """Return whether the command was asked to end by SIGTERM."""
    return _Asked.terminated


def left_in_native_code() -> bool:
    """Return whether a rank's thread is still in a run that has ended without it."""
    return any(thread.name in IN_NATIVE_CODE for thread in threading.enumerate())


def _interrupted(number: int, frame: FrameType | None) -> None:
    if _importing("torch"):  # before there is anything to clean up
        os.write(2, b"piper: interrupted\n")
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt


def _terminated(number: int, frame: FrameType | None) -> None:
    """End as after an interrupt: a run finishes its step, and workers and Ray are ended on the way out."""
    if (
        os.environ.get("RANK", "0") == "0"
    ):  # torchrun ends all ranks at once, and one line is enough
        os.write(2, b"piper: ended by SIGTERM\n")
    if _importing("torch"):
        os._exit(TERMINATED)
    _Asked.terminated = True
    interrupted = signal.getsignal(signal.SIGINT)
    if not callable(interrupted) or interrupted in (_interrupted, signal.default_int_handler):
        raise _Terminated
    interrupted(number, frame)  # a run in this process, which ends with its step


def _end_in_time() -> None:
    """Start a thread that ends this process some seconds after SIGTERM, if the main thread does not.

    Python runs handlers between two of its instructions only, so a main thread that waits in native code never hears.
    The byte in this pipe is written by the system's handler.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    os.register_at_fork(
        after_in_child=lambda: signal.set_wakeup_fd(-1)
    )  # a child's signals are not ours

    def listen() -> None:
        while received := os.read(reading, 1):
            if received[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is _terminated:
                time.sleep(END_S)
                if _Asked.terminated:
                    time.sleep(IN_ORDER_S - END_S)
                os._exit(TERMINATED)

    Thread(target=listen, name="piper end", daemon=True).start()


def _importing(name: str) -> bool:
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


def _dropped(what: Any) -> None:
    if not issubclass(what.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(what)
        return
    again = Timer(
        AGAIN_S, signal.pthread_kill, (main_thread().ident, signal.SIGINT)
    )  # the one that may be asleep
    again.daemon = True
    again.start()
