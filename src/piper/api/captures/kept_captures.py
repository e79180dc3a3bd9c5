"""Keep captures in files of the user's, by content, so that another process need not trace the same model again.

The folder is `PIPER_CACHE`, or the user's own for caches (on Linux `piper` in `XDG_CACHE_HOME`, or `~/.cache/piper`).
With `PIPER_CACHE=""` nothing is kept. A file is read by `pickle`, and holds code that a run executes. So the folder
must belong to the user and be open to nobody else (mode 0700), or it is not used. Files are written under another name
and renamed, and begin with a digest of the rest; one that cannot be read is replaced. Captures of other versions of
Piper, torch or Python, and of machines with other devices, have folders of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import glob
import hashlib
import os
import pickle
import platform
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from piper_ir.ground.errors import CaptureError, PiperWarning

if TYPE_CHECKING:
    from piper.api.captures.installed import InstalledState
    from piper_capture import Captured, Traced

MOST_FILES = 64
"""The number of captures that are kept, of all versions together; the one that was used the longest ago goes first."""
DIGEST_BYTES = 16
LEFT_S = 86400
"""The age in seconds from which on a half-written file was left by a process that died."""
SOURCES = ("piper", "piper_ir", "piper_ops", "piper_capture", "piper_compiler")
"""The packages whose source makes captures; of a model of `piper.models` only the name is in its content."""


@dataclass
class KeptFile:
    """Name the file of a capture, and its content.

    Attributes:
        around: the state of installed packages that the capture depends on.
        extent: how much of the capture the file holds.
    """

    path: Path
    captured: Traced
    around: InstalledState
    extent: int = 0

    def write(self) -> None:
        """Write the capture if it holds more than the file; warn of one that cannot be pickled or written."""
        from piper_capture import extent, stored

        now = extent(self.captured)
        if now == self.extent:
            return
        self.extent = now
        try:
            content = pickle.dumps((self.around, stored(self.captured)))
            _replace(self.path, _digest(content) + content)
        except Exception as error:  # of whatever kind: the training does not need the file
            _say(
                f"a capture could not be kept, so the next command may make it anew ({self.path}: "
                f"{type(error).__name__}: {error})"
            )


_FILES: dict[int, KeptFile] = {}


def kept_or_made(
    name: str | None, name_now: Callable[[], str | None], make: Callable[[], Traced]
) -> Traced:
    """Return the capture from the file of this name, or else a new one, which is kept.

    Without a name nothing is kept. `name_now` tells the name again, when something is asked for that the file does not
    hold: it is another one if the model has changed.
    """
    from piper.api.captures.installed import installed_state
    from piper.api.captures.package_settings import settings

    folder = kept_folder() if name is not None else None
    if folder is None:
        return make()
    path = folder / f"{name}.pickle"

    def made_again() -> Traced:
        if name_now() != name:
            raise CaptureError(
                "the model, its loss, or something that they read has changed since this was compiled; "
                "call piper.compile again"
            )
        return make()

    file = _read(path, made_again)
    if file is None:
        before = settings()
        captured = make()
        around = None if before is None else installed_state(before)
        if around is None:
            return captured
        file = KeptFile(path, captured, around)
    if not _FILES:
        atexit.register(write_grown)
    _FILES[id(file.captured)] = file
    return file.captured


def write_first(captured: Traced | Captured) -> None:
    """Write a capture if its file is not there yet; later it is written once more, when the process ends."""
    file = _FILES.get(id(captured))
    if file is not None and not file.extent:
        file.write()


def forget(captured: Traced, remove: bool = False) -> None:
    """Let go of a capture; `remove` its file, too, if it must not be used again."""
    file = _FILES.pop(id(captured), None)
    if file is not None:
        file.path.unlink(missing_ok=True) if remove else file.write()


def write_grown() -> None:
    """Write the captures that hold more than their files."""
    for file in _FILES.values():
        file.write()


def kept_folder() -> Path | None:
    """Return the folder of this version's captures; None if none are kept, or it is not the user's alone."""
    return kept_base("captures", version())


def kept_base(kind: str, version: str) -> Path | None:
    """Return the folder of one version's files of a kind; None if none are kept, or it is not the user's alone."""
    asked = os.environ.get("PIPER_CACHE")
    if asked == "":
        return None
    try:
        base = Path(asked) if asked else _folder_of_the_user()
        folder = base / kind / version
        for part in (base, base / kind, folder):
            part.mkdir(mode=0o700, parents=part is base, exist_ok=True)
            if not _is_private(part):
                _say(
                    f"{part} is not used to keep {kind}: it must be a folder of yours that nobody else can open "
                    f"(chmod 700)"
                )
                return None
    except (OSError, RuntimeError):  # no place to write, or no home
        return None
    return folder


def _folder_of_the_user() -> Path:
    """Return the folder for caches of this user.

    Raises RuntimeError for a user without a home, in whose place there would be a folder "~".
    """
    from platformdirs import user_cache_path

    folder = user_cache_path("piper", appauthor=False)
    if not folder.is_absolute():
        raise RuntimeError("this user has no home")
    return folder


@functools.cache
def version() -> str:
    """Return a digest of everything beside its content that decides how a capture is made."""
    import torch

    said = (
        torch.__version__,
        torch.version.git_version,
        sys.version,
        platform.uname(),
        *_distributions(),
        *_devices(),
    )
    digest = hashlib.blake2b(repr(said).encode(), digest_size=8)
    for name in SOURCES:
        for path in sorted(Path(import_module(name).__path__[0]).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _distributions() -> list[str]:
    """Return the installed distributions with their versions, as the names of folders say them.

    `find_spec` and the like depend on them.
    """
    return sorted(
        {path.name for folder in sys.path if folder for path in Path(folder).glob("*.dist-info")}
    )


def _devices() -> list[str | None]:
    """Return the variable and files that `torch.cuda.is_available()` and the like depend on, not asking devices."""
    return [
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        *sorted(os.path.realpath(path) for path in glob.glob("/dev/nvidia[0-9]*")),
    ]


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def _is_private(folder: Path) -> bool:
    status = folder.lstat()
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o077
    )


def _read(path: Path, make: Callable[[], Traced]) -> KeptFile | None:
    """Return the capture of a file; None if there is none that can be read."""
    from piper.api.captures.installed import InstalledState
    from piper_capture import StoredTrace, extent, restored

    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return None
            content = file.read()
        if _digest(content[DIGEST_BYTES:]) != content[:DIGEST_BYTES]:
            raise ValueError("some of it is missing or another")
        around, kept = pickle.loads(content[DIGEST_BYTES:])
        if not isinstance(kept, StoredTrace) or not isinstance(around, InstalledState):
            raise TypeError(f"it holds a {type(kept).__name__}")
    except FileNotFoundError:
        return None
    except Exception as error:  # of whatever kind: bytes that are broken may raise anything
        _say(
            f"a capture could not be read and is made anew ({path}: {type(error).__name__}: {error})"
        )
        return None
    if not around.hold():
        return None
    with contextlib.suppress(OSError):  # a folder that cannot be written
        os.utime(path)
    captured = restored(kept, make)
    return KeptFile(path, captured, around, extent(captured))


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
    every = path.parent.parent
    kept = sorted(every.glob("*/*.pickle"), key=_used_at)
    left = [part for part in every.glob("*/*.part") if _used_at(part) < time.time() - LEFT_S]
    for old in (*kept[:-MOST_FILES], *left):
        old.unlink(missing_ok=True)


def _used_at(path: Path) -> float:
    """Return when a file was used last; 0 for one that another process has removed."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _say(text: str) -> None:
    warnings.warn(text, PiperWarning, stacklevel=2)
