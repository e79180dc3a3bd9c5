"""Say what captures depend on in installed packages, which the content of the user's code does not show.

The content of code follows a function of an installed package, but not what that calls in its own package. So a capture
in a file has a list of what must be the same where it is used again: the source of all installed packages that were
loaded, and of those that use torch also their settings and the variables of the environment that their source names.
What the user has put into such a package, such as a function in a registry, counts with its own content.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from piper.api.content import content_of
from piper.api.foreign import PLAIN, of_the_user
from piper.api.reads import Unseen
from piper_runtime.rank import home_of

MOST_ITEMS = 1000
"""The length of a setting from which on it is a table, which nobody changes."""
_ENVIRONMENT = re.compile(rb"""(?:environ(?:\.get|\.setdefault|\.pop)?\s*[\[(]|getenv\(|_is_true\()\s*["'](\w+)["']""")
_NAME = re.compile(rb"""["']([A-Z][A-Z0-9]*_[A-Z0-9_]+)["']""")


@dataclass(frozen=True)
class SourceFile:
    """Hold what tells whether a file has changed; the digest is "" of a file that is no Python source."""

    size: int
    changed_ns: int
    digest: str

    def holds(self, path: str) -> bool:
        """Return whether the file is still the same."""
        found = _stat(path)
        if found is None or found.st_size != self.size:
            return False
        if found.st_mtime_ns == self.changed_ns:
            return True
        return bool(self.digest) and _digest_of(Path(path)) == self.digest


@dataclass(frozen=True)
class InstalledState:
    """Hold what a capture in a file depends on in installed packages.

    Attributes:
        files: path -> source.
        settings: module -> digest of its settings before the capture.
        environment: variable -> its value.
    """

    files: Mapping[str, SourceFile]
    settings: Mapping[str, str]
    environment: Mapping[str, str | None]

    def hold(self) -> bool:
        """Return whether all is as it was."""
        if any(os.environ.get(name) != value for name, value in self.environment.items()):
            return False
        if not all(file.holds(path) for path, file in self.files.items()):
            return False
        now = settings({name for name in self.settings if name in sys.modules})
        return now is not None and all(self.settings[name] == digest for name, digest in now.items())


def installed_state(before: Mapping[str, str]) -> InstalledState | None:
    """Return what was there while the model was captured; `before` are the settings before the capture.

    None where a file has changed since this process began, so that it need not be what was loaded.
    """
    files: dict[str, SourceFile] = {}
    environment: set[str] = set()
    for name, path in _installed():
        found = _stat(path)
        if found is None or max(found.st_mtime, found.st_ctime) > started():
            return None
        files[path] = SourceFile(found.st_size, found.st_mtime_ns, _digest_of(Path(path)))
        if _uses_torch(name.partition(".")[0]):
            environment |= _variables(Path(path))
    return InstalledState(files, dict(before), {name: os.environ.get(name) for name in sorted(environment)})


def settings(names: Iterable[str] | None = None) -> dict[str, str] | None:
    """Return a digest of the settings of each loaded module of installed packages that use torch.

    None where something that the user has put there has no content.
    """
    found: dict[str, str] = {}
    seen: set[int] = set()
    try:
        for name in sorted(n for n, _ in _installed() if _uses_torch(n.partition(".")[0])) if names is None else sorted(names):
            values = {key: value for key, value in vars(sys.modules[name]).items() if not key.startswith("__")}
            texts = [f"{key} {text}" for key, value in values.items() if (text := _setting(value)) is not None]
            given = [part for value in values.values() for part in of_the_user(value, seen)]
            content = content_of(given, lines=True) if given else ""
            if content is None:
                return None
            found[name] = hashlib.blake2b("\n".join([*texts, content]).encode("utf-8", "replace"), digest_size=16).hexdigest()
    except Unseen:
        return None
    return found


def _setting(value: object, depth: int = 2) -> str | None:
    """Return the text of a plain value, or of a small nest of them; None for anything else."""
    if type(value) in PLAIN:
        return repr(value)
    if depth and isinstance(value, dict) and dict.__len__(value) < MOST_ITEMS:
        # What is stored, as `dict` has it: a class may import packages in an `items` of its own, and fail.
        items = [(_setting(k, 0), _setting(v, depth - 1)) for k, v in list(dict.items(value))]
        return repr([pair for pair in items if None not in pair])
    if depth and isinstance(value, list | tuple | set | frozenset) and len(value) < MOST_ITEMS:
        texts = [text for item in list(value) if (text := _setting(item, depth - 1)) is not None]
        return repr(sorted(texts) if isinstance(value, set | frozenset) else texts)
    return None


def _installed() -> list[tuple[str, str]]:
    """Return (name, file) of the loaded modules of installed packages."""
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and home_of(name) == "installed":
            found.append((name, file))
    return found


def _uses_torch(package: str) -> bool:
    """Return whether a loaded module of a package has torch, or one of its modules, among its variables."""
    return package in _packages_with_torch(len(sys.modules))


@functools.lru_cache(maxsize=4)
def _packages_with_torch(loaded: int) -> frozenset[str]:
    """Return the installed packages that use torch; what is `loaded` may change, and its number with it."""
    found = set()
    for name, _ in _installed():
        space = vars(sys.modules[name])
        if any(getattr(space.get(word), "__name__", "").partition(".")[0] == "torch" for word in ("torch", "nn", "F")):
            found.add(name.partition(".")[0])
    return frozenset(found)


def _variables(path: Path) -> set[str]:
    """Return the variables of the environment that a source names."""
    text = _source(path)
    if b"environ" not in text and b"getenv" not in text:
        return set()
    return {name.decode() for pattern in (_ENVIRONMENT, _NAME) for name in pattern.findall(text)}


def _source(path: Path) -> bytes:
    return path.read_bytes() if path.suffix == ".py" else b""


def _digest_of(path: Path) -> str:
    return hashlib.blake2b(_source(path), digest_size=16).hexdigest() if path.suffix == ".py" else ""


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


@functools.cache
def started() -> float:
    """Return when this process began, in seconds since 1970; where the system does not say it, when Piper was asked."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        return float(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration, IndexError, ValueError):
        return _ASKED


_ASKED = time.time()
