"""Turn exceptions of the user's own functions into Piper's errors, which say whose function failed, and where."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from piper_ir.ground.errors import PiperError

LIBRARIES = (*(sysconfig.get_paths()[k] for k in ("stdlib", "purelib", "platlib")), "<")
"""The beginnings of file names that are not the user's: installed libraries, Python's own, and generated code."""

PACKAGES = {
    "piper_ir",
    "piper_ops",
    "piper_capture",
    "piper_compiler",
    "piper_simulator",
    "piper_runtime",
    "piper_report",
    "piper_autotune",
}
"""The folders that hold Piper's own code."""


@contextmanager
def user_code(call: str, kind: type[PiperError]) -> Iterator[None]:
    """Raise `kind` with the user's innermost line when the user's function inside raises; Piper's own errors pass.

    `call` says in the message how the function was called.
    """
    try:
        yield
    except PiperError:
        raise
    except Exception as error:  # a user's function may fail in any way
        raise kind(f"{call} raised {type(error).__name__}: {error}{user_line(error)}") from error


def user_line(error: BaseException) -> str:
    """Return the user's innermost line in an exception, as " (file:line)"; an empty text when there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _ours(f.filename)]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _ours(file: str) -> bool:
    """Return whether a file belongs to a library or to Piper, installed or in its repository."""
    return file.startswith(LIBRARIES) or not PACKAGES.isdisjoint(Path(file).parts)
