"""Exceptions of the user's own functions, as one of Piper's errors that says whose they are and where."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from piper_ir.errors import JobError, PiperError

LIBRARIES = (*(sysconfig.get_paths()[k] for k in ("stdlib", "purelib", "platlib")), str(Path(__file__).parent), "<")
"""How file names start that are not the user's: installed libraries, Python's own, this package, and generated code."""


@contextmanager
def user_code(call: str) -> Iterator[None]:
    """Around a call of a user's function, written as `call`. Raises JobError, with the user's innermost line, for every
    exception but Piper's own, which pass."""
    try:
        yield
    except PiperError:
        raise
    except Exception as error:  # a user's function may fail in any way
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(LIBRARIES)]
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        raise JobError(f"{call} raised {type(error).__name__}: {error}{where}") from error
