"""Find the state of installed packages that captures depend on, and that the content of the user's code does not show.

The content of code follows a function of an installed package, but not the functions that it calls in its own package.
So a capture in a file lists the things that must be the same when it is used again: the files of all installed packages
that were loaded, their settings, and the variables of the environment that their source names. An object that the user
has put into such a package, such as a function in a registry, counts with its own content.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from piper.api.captures.package_settings import (
    PackageSettings,
    changed,
    digest_of,
    installed_modules,
    settings,
)
from piper_runtime.rank import origin_of

_ENVIRONMENT = re.compile(
    rb"""(?:environ(?:\.get|\.setdefault|\.pop)?\s*[\[(]|getenv\(|_is_true\()\s*["'](\w+)["']"""
)
_NAME = re.compile(rb"""["']([A-Z][A-Z0-9]*_[A-Z0-9_]+)["']""")
_FILE = re.compile(rb"""["']([\w./ -]{1,200}\.[A-Za-z]\w{0,11})["']""")
_LISTS = (
    b"glob(",
    b"iterdir(",
    b"listdir(",
    b"scandir(",
    b".walk(",
    b"importlib.resources",
    b"importlib_resources",
)
_CODE = frozenset([".py", ".pyc", ".pyi", ".so", ".pyd"])
MOST_DATA = 2**20
"""The most bytes of a data file that counts although no source names it; larger ones are data sets and weights."""


@dataclass(frozen=True)
class InstalledState:
    """Hold the state of installed packages that a capture in a file depends on.

    Attributes:
        files: path of each loaded file, and of each that its source names -> digest of its content; sizes and times say
            nothing, since package managers set them.
        places: module -> its file.
        settings: the settings before the capture.
        environment: variable -> its value.
    """

    files: Mapping[str, str]
    places: Mapping[str, str]
    settings: PackageSettings
    environment: Mapping[str, str | None]

    def hold(self) -> bool:
        """Return whether all is as it was."""
        if any(os.environ.get(name) != value for name, value in self.environment.items()):
            return False
        if any(digest_of(_content(path)) != digest for path, digest in self.files.items()):
            return False
        if any(_place(name, path) != path for name, path in self.places.items()):
            return False
        now = settings({name for name in self.settings if name in sys.modules})
        return now is not None and not any(
            changed(name, self.settings[name], found) for name, found in now.items()
        )


def installed_state(before: PackageSettings) -> InstalledState | None:
    """Return the state while the model was captured; `before` are the settings before the capture.

    None if a file has changed since this process began, so that its loaded content may be another.
    """
    files: dict[str, str] = {}
    environment: set[str] = set()
    places = dict(installed_modules())
    for path in places.values():
        found = _stat(path)
        if found is None or max(found.st_mtime, found.st_ctime) > started():
            return None
        content = _content(path)
        files[path] = digest_of(content)
        if path.endswith(".py"):
            environment |= _variables(content)
            files |= {name: digest_of(_content(name)) for name in _data(content, Path(path).parent)}
    return InstalledState(
        files, places, dict(before), {name: os.environ.get(name) for name in sorted(environment)}
    )


def _place(name: str, path: str) -> str:
    """Return the file from which a module is or would be loaded; `path` if none is found."""
    if name in sys.modules:
        return str(getattr(sys.modules[name], "__file__", ""))
    return origin_of(name) or path


def _variables(source: bytes) -> set[str]:
    """Return the variables of the environment that a source names."""
    if b"environ" not in source and b"getenv" not in source:
        return set()
    return {name.decode() for pattern in (_ENVIRONMENT, _NAME) for name in pattern.findall(source)}


def _data(source: bytes, folder: Path) -> set[str]:
    """Return the files below a module's folder that its source names; all data there of a source that lists files."""
    if any(call in source for call in _LISTS) and folder.name not in (
        "site-packages",
        "dist-packages",
    ):
        return {
            path
            for path in _below(folder)
            if Path(path).suffix not in _CODE and os.path.getsize(path) <= MOST_DATA
        }
    names = {name.decode() for name in _FILE.findall(source)}
    return {
        str(path)
        for name in names
        if not name.endswith(".py") and (path := folder / name).is_file()
    }


@functools.cache
def _below(folder: Path) -> tuple[str, ...]:
    """Return the paths of all files below a folder."""
    return tuple(os.path.join(at, name) for at, _, names in os.walk(folder) for name in names)


def _content(path: str) -> bytes:
    """Return the content of a file; nothing of a file that is gone."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


@functools.cache
def started() -> float:
    """Return when this process began, in seconds since 1970; if the system does not say it, when Piper was asked."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        booted = next(
            line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")
        )
        return float(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration, IndexError, ValueError):
        return _ASKED


_ASKED = time.time()
