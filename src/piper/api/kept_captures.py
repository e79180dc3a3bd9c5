"""Keep captures in files of the user's, by content, so that another process need not trace the same model again.

The folder is `PIPER_CACHE`, or `piper` in `XDG_CACHE_HOME`, or `~/.cache/piper`; with `PIPER_CACHE=""` nothing is kept.
A file is read by `pickle`, and holds code that a run executes. So the folder must belong to the user and be open to
nobody else (mode 0700), or it is not used. Files are written under another name and renamed, and one that cannot be
read is replaced. Captures of other versions of Piper, torch or Python have folders of their own.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import pickle
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from piper_ir.errors import PiperWarning

if TYPE_CHECKING:
    from piper_compiler.capture import Captured

MOST_FILES = 64
"""The number of captures that are kept, of all versions together; the one that was used the longest ago goes first."""
SOURCES = ("piper", "piper_ir", "piper_ops", "piper_compiler")
"""The packages whose source says what a capture is; of a model of `piper.models` only the name is in its content."""


@dataclass
class KeptFile:
    """Name the file of a capture, and what it holds.

    Attributes:
        extent: how much of the capture the file holds.
    """

    path: Path
    captured: Captured
    extent: int = 0

    def write(self) -> None:
        """Write the capture where it holds more than the file; what cannot be pickled or written is left out."""
        from piper_compiler.capture import extent, stored

        now = extent(self.captured)
        if now == self.extent:
            return
        self.extent = now
        try:
            _replace(self.path, pickle.dumps(stored(self.captured)))
        except (OSError, pickle.PicklingError, TypeError, AttributeError, RecursionError):
            self.path.unlink(missing_ok=True)


_FILES: dict[int, KeptFile] = {}


def kept_or_made(content: str | None, make: Callable[[], Captured]) -> Captured:
    """Return the capture of this content from its file, or else a new one, which is kept.

    Without a content nothing is kept.
    """
    folder = kept_folder() if content is not None else None
    if folder is None or content is None:
        return make()
    path = folder / f"{hashlib.blake2b(content.encode(), digest_size=16).hexdigest()}.pickle"
    file = _read(path, make)
    if file is None:
        file = KeptFile(path, make())
        file.write()
    if not _FILES:
        atexit.register(write_grown)
    _FILES[id(file.captured)] = file
    return file.captured


def forget(captured: Captured, remove: bool = False) -> None:
    """Let go of a capture; `remove` its file, too, where it must not be used again."""
    file = _FILES.pop(id(captured), None)
    if file is not None:
        file.path.unlink(missing_ok=True) if remove else file.write()


def write_grown() -> None:
    """Write the captures that hold more than their files."""
    for file in _FILES.values():
        file.write()


def kept_folder() -> Path | None:
    """Return the folder of this version's captures; None where none are kept, or it is not the user's alone."""
    asked = os.environ.get("PIPER_CACHE")
    if asked == "":
        return None
    base = Path(asked) if asked else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "piper"
    folder = base / "captures" / version()
    try:
        for part in (base, base / "captures", folder):
            part.mkdir(mode=0o700, parents=part is base, exist_ok=True)
            if not _is_private(part):
                _say(f"{part} is not used to keep captures: it must be a folder of yours that nobody else can open (chmod 700)")
                return None
    except (OSError, RuntimeError):  # no place to write, or no home
        return None
    return folder


@functools.cache
def version() -> str:
    """Return a digest of all that decides what a capture is, beside its content."""
    import torch

    digest = hashlib.blake2b(f"{torch.__version__} {torch.version.git_version} {sys.version}".encode(), digest_size=8)
    for name in SOURCES:
        for path in sorted(Path(import_module(name).__path__[0]).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _is_private(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _read(path: Path, make: Callable[[], Captured]) -> KeptFile | None:
    """Return the capture of a file; None where there is none that can be read."""
    from piper_compiler.capture import StoredCapture, extent, restored

    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return None
            kept = pickle.load(file)
        if not isinstance(kept, StoredCapture):
            raise TypeError(f"it holds a {type(kept).__name__}")
        os.utime(path)
    except FileNotFoundError:
        return None
    except Exception as error:  # of whatever kind: bytes that are broken may raise anything
        _say(f"a capture could not be read and is made anew ({path}: {type(error).__name__})")
        return None
    captured = restored(kept, make)
    return KeptFile(path, captured, extent(captured))


def _replace(path: Path, content: bytes) -> None:
    """Put a file in its place at once, so that no other process reads half of it; let go of the oldest ones."""
    number, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    kept = sorted(path.parent.parent.glob("*/*.pickle"), key=lambda file: file.stat().st_mtime)
    for old in kept[:-MOST_FILES]:
        old.unlink(missing_ok=True)


def _say(text: str) -> None:
    warnings.warn(text, PiperWarning, stacklevel=2)
