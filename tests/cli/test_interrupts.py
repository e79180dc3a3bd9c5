"""Ctrl-C reaches the command also where Python drops what is raised."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BACKGROUND = "signal.signal(signal.SIGINT, signal.default_int_handler)"
"""A shell lets what it starts in the background ignore Ctrl-C."""
HEAR = f"import os, signal, time\nfrom piper.cli.interrupts import hear\n{BACKGROUND}\n{{hear}}\n"
INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"
FINALIZER = f"class Late:\n    def __del__(self):\n        {INTERRUPT}\nLate()\n"
WAIT = "try:\n    time.sleep({seconds})\nexcept KeyboardInterrupt:\n    raise SystemExit(130)\nprint('went on')\n"


def ran(code: str, folder: Path, hear: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a script."""
    found = subprocess.run(
        [sys.executable, "-c", HEAR.format(hear=hear) + code],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return found.returncode, found.stdout, found.stderr


@pytest.mark.parametrize("heard", [True, False])
def test_an_interrupt_while_torch_is_imported(heard: bool, tmp_path: Path) -> None:
    """A torch that drops it, as the real one does in the part of its import that looks for NumPy. Without `hear` it is
    lost."""
    drops = f"import os, signal\ntry:\n    {INTERRUPT}\n    import json\nexcept BaseException:\n    pass\n"
    (tmp_path / "torch.py").write_text(drops)
    told = ran("import torch; print('went on')", tmp_path, "hear()" if heard else "")
    assert told == ((130, "", "piper: interrupted\n") if heard else (0, "went on\n", ""))


def test_an_interrupt_in_a_finalizer_is_told_of_again(tmp_path: Path) -> None:
    assert ran(FINALIZER + WAIT.format(seconds=30), tmp_path, "hear()") == (130, "", "")


def test_negative_control_python_drops_it(tmp_path: Path) -> None:
    code, out, errors = ran(FINALIZER + WAIT.format(seconds=0.2), tmp_path, "")
    assert (code, out) == (0, "went on\n") and "Exception ignored" in errors


def test_other_errors_in_finalizers_are_shown_as_ever_and_ignored_interrupts_stay_so(
    tmp_path: Path,
) -> None:
    code, _, errors = ran(
        "class Bad:\n    def __del__(self):\n        1 / 0\nBad()\n", tmp_path, "hear()"
    )
    assert code == 0 and "ZeroDivisionError" in errors
    ignored = "signal.signal(signal.SIGINT, signal.SIG_IGN); hear()"
    assert ran(f"{INTERRUPT}; print('went on')", tmp_path, ignored) == (0, "went on\n", "")


def test_a_request_to_end_unwinds_and_says_so(tmp_path: Path) -> None:
    terminate = "os.kill(os.getpid(), signal.SIGTERM)"
    unwind = f"try:\n    {terminate}\n    time.sleep(30)\nfinally:\n    print('ended workers')\n"
    assert ran(unwind, tmp_path, "hear()") == (143, "ended workers\n", "piper: ended by SIGTERM\n")
    assert ran(unwind, tmp_path, "")[0] == -15, "the control: nothing is unwound"
    ignored = "signal.signal(signal.SIGTERM, signal.SIG_IGN); hear()"
    assert ran(f"{terminate}; print('went on')", tmp_path, ignored) == (0, "went on\n", "")


def test_a_main_thread_in_native_code_is_ended_all_the_same(tmp_path: Path) -> None:
    """pthread_mutex_lock, unlike sleep, goes on waiting after a signal, as reads of torch's store do."""
    held = (
        "import ctypes, threading, piper.cli.interrupts as interrupts\ninterrupts.END_S = 0.2\nlib = "
        "ctypes.CDLL(None)\nlock = "
        "ctypes.create_string_buffer(64)\nlib.pthread_mutex_lock(lock)\nthreading.Timer(0.2, os.kill, "
        "(os.getpid(), signal.SIGTERM)).start()\nlib.pthread_mutex_lock(lock)\nprint('went on')\n"
    )
    assert ran(held, tmp_path, "hear()")[:2] == (143, "")


def test_the_end_of_a_child_is_not_the_end_of_its_parent(tmp_path: Path) -> None:
    forked = (
        "import piper.cli.interrupts as interrupts\ninterrupts.END_S = 0.2\nchild = os.fork()\n"
        "if not child:\n    time.sleep(30)\ntime.sleep(0.2)\n"
        "os.kill(child, signal.SIGTERM)\nos.waitpid(child, 0)\ntime.sleep(1)\nprint('went on')\n"
    )
    assert ran(forked, tmp_path, "hear()")[:2] == (0, "went on\n")
