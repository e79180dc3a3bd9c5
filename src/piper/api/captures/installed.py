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

_NAME = re.compile(rb"""["']([A-Za-z_]\w*)["']""")
_SITES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class InstalledState:
    """Hold the state of installed packages that a capture in a file depends on.

    Attributes:
        places: the first part of a module's name -> the package's folder, or its file.
        files: such a folder or file -> a digest of the sizes and times of all files in it.
        settings: the settings before the capture.
        environment: variable -> its value.
    """

    places: Mapping[str, str]
    files: Mapping[str, str]
    settings: PackageSettings
    environment: Mapping[str, str | None]

    def hold(self) -> bool:
        """Return whether all is as it was."""
        if any(os.environ.get(name) != value for name, value in self.environment.items()):
            return False
        now = _places()
        present = {name: now.get(name) or _place(origin_of(name) or "") for name in self.places}
        if any(present[name] not in (place, "") for name, place in self.places.items()):
            return False
        if any(_files(place)[0] != digest for place, digest in self.files.items()):
            return False
        ours = settings({name for name in self.settings if name in sys.modules})
        return ours is not None and not any(
            changed(name, self.settings[name], values) for name, values in ours.items()
        )


def installed_state(before: PackageSettings) -> InstalledState | None:
    """Return the state while the model was captured; `before` are the settings before the capture.

    None if a file has changed since this process began, so that its loaded content may be another.
    """
    places = _places()
    files: dict[str, str] = {}
    for place in {_place(path) for _, path in installed_modules()}:
        files[place], newest = _files(place)
        if newest > started():
            return None
    names = {name for _, path in installed_modules() for name in _variables(path)}
    return InstalledState(
        places, files, dict(before), {name: os.environ.get(name) for name in sorted(names)}
    )


def _places() -> dict[str, str]:
    return {name.partition(".")[0]: _place(path) for name, path in sorted(installed_modules())}


def _place(path: str) -> str:
    """Return the folder or file that a module's file belongs to among the installed packages; else the file."""
    parts = Path(path).parts
    sites = [number for number, part in enumerate(parts) if part in _SITES]
    return str(Path(*parts[: sites[-1] + 2])) if sites else path


def _files(place: str) -> tuple[str, float]:
    """Return a digest of the files in a folder, or of one file, and the last time when one was changed.

    The system sets the time of a change (`st_ctime`) itself, while `cp -p`, conda and nix give other content the same
    size and time of modification. What Python has compiled does not count.
    """
    folders = sorted(os.walk(place)) or [("", [], [place])]
    paths = [
        os.path.join(folder, name)
        for folder, _, names in folders
        if not folder.endswith("__pycache__")
        for name in sorted(names)
    ]
    entries = [(path, _stat(path)) for path in paths]
    stats = [(p, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for p, s in entries if s is not None]
    newest = max((max(modified, changed) for _, _, modified, changed in stats), default=0)
    return digest_of(repr(stats).encode()), newest / 1e9


def _variables(path: str) -> set[str]:
    """Return the texts that may name variables of the environment in a source that reads it."""
    source = Path(path).read_bytes() if path.endswith(".py") else b""
    reads = b"environ" in source or b"getenv" in source
    return {name.decode() for name in _NAME.findall(source)} if reads else set()


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
