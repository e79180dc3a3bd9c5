"""Say what captures depend on in installed packages, which the content of the user's code does not show.

The content of code follows a function of an installed package, but not what that calls in its own package. So a capture
in a file has a list of what must be the same where it is used again: the files of all installed packages that were
loaded, their settings, and the variables of the environment that their source names.
What the user has put into such a package, such as a function in a registry, counts with its own content.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import time
import types
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
_RANDOM = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""The names that a package draws for each process, such as that of a session."""
_NAME = re.compile(rb"""["']([A-Z][A-Z0-9]*_[A-Z0-9_]+)["']""")


@dataclass(frozen=True)
class InstalledState:
    """Hold what a capture in a file depends on in installed packages.

    Attributes:
        files: path of each loaded file -> digest of its content; sizes and times say nothing, since package managers
            set them.
        settings: module -> digest of its settings before the capture.
        environment: variable -> its value.
    """

    files: Mapping[str, str]
    settings: Mapping[str, str]
    environment: Mapping[str, str | None]

    def hold(self) -> bool:
        """Return whether all is as it was."""
        if any(os.environ.get(name) != value for name, value in self.environment.items()):
            return False
        if any(_digest_of(_content(path)) != digest for path, digest in self.files.items()):
            return False
        now = settings({name for name in self.settings if name in sys.modules})
        return now is not None and all(self.settings[name] == digest for name, digest in now.items())


def installed_state(before: Mapping[str, str]) -> InstalledState | None:
    """Return what was there while the model was captured; `before` are the settings before the capture.

    None where a file has changed since this process began, so that it need not be what was loaded.
    """
    files: dict[str, str] = {}
    environment: set[str] = set()
    for _, path in _installed():
        found = _stat(path)
        if found is None or max(found.st_mtime, found.st_ctime) > started():
            return None
        content = _content(path)
        files[path] = _digest_of(content)
        if path.endswith(".py"):
            environment |= _variables(content)
    return InstalledState(files, dict(before), {name: os.environ.get(name) for name in sorted(environment)})


def settings(names: Iterable[str] | None = None) -> dict[str, str] | None:
    """Return a digest of the settings of each loaded module of installed packages.

    Settings are plain values, also those of its classes. Returns None where something that the user has put there has
    no content.
    """
    found: dict[str, str] = {}
    seen: set[int] = set()
    try:
        for name in sorted(_reached()) if names is None else sorted(names):
            values = {key: value for key, value in list(vars(sys.modules[name]).items()) if not key.startswith("__")}
            texts = [f"{k} {text}" for k, value in values.items() if (text := _setting(value, objects=k[0] != "_")) is not None]
            texts += _of_classes(kind for kind in values.values() if isinstance(kind, type) and kind.__module__ == name)
            given = [part for value in values.values() for part in of_the_user(value, seen)]
            content = content_of(given, lines=True) if given else ""
            if content is None:
                return None
            found[name] = hashlib.blake2b("\n".join([*texts, content]).encode("utf-8", "replace"), digest_size=16).hexdigest()
    except Unseen:
        return None
    return found


def _setting(value: object, depth: int = 4, objects: bool = False) -> str | None:
    """Return the text of a plain value, or of a small nest of them; None for other values.

    With `objects`, objects of a package's own have a text, too.
    """
    if type(value) in PLAIN:
        return None if isinstance(value, str) and _RANDOM.fullmatch(value) else repr(value)
    if depth and isinstance(value, dict) and dict.__len__(value) < MOST_ITEMS:
        # What is stored, as `dict` has it: a class may import packages in an `items` of its own, and fail.
        items = [(_setting(k, 0), _setting(v, depth - 1)) for k, v in list(dict.items(value))]
        return repr(sorted(pair for pair in items if None not in pair))
    if depth and isinstance(value, list | tuple | set | frozenset) and len(value) < MOST_ITEMS:
        texts = [text for item in list(value) if (text := _setting(item, depth - 1)) is not None]
        return repr(sorted(texts) if isinstance(value, set | frozenset) else texts)
    if objects and home_of(type(value).__module__) == "installed" and isinstance(space := getattr(value, "__dict__", None), dict):
        return _setting(space, depth - 1)  # a container of settings that the package has made
    return None


def _reached() -> set[str]:
    """Return the loaded modules of packages that use torch, or that the user's modules name, or that these do."""
    modules: dict[str, list[str]] = {}
    for name, _ in _installed():
        modules.setdefault(_package(name), []).append(name)
    todo: set[str] = set()
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType):
            todo |= _named_in(module) if home_of(name) == "user" else set()
            todo |= {_package(name)} if "torch" in vars(module) or "nn" in vars(module) else set()
    todo &= modules.keys()
    found: set[str] = set()
    while todo:
        found.add(package := todo.pop())
        todo |= {other for name in modules[package] for other in _named_in(sys.modules[name])} & modules.keys() - found
    return {name for package in found for name in modules[package]}


def _named_in(module: types.ModuleType) -> set[str]:
    """Return the packages of which a module has modules, functions or classes among its variables."""
    values = list(vars(module).values())
    return {
        _package(v.__name__ if isinstance(v, types.ModuleType) else getattr(v, "__module__", None) or "")
        for v in values
        if isinstance(v, types.ModuleType | types.FunctionType | type)
    }


def _package(module: object) -> str:
    return str(module).partition(".")[0]


def _installed() -> list[tuple[str, str]]:
    """Return (name, file) of the loaded modules of installed packages."""
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and home_of(name) == "installed":
            found.append((name, file))
    return found


def _of_classes(kinds: Iterable[type]) -> list[str]:
    """Return the plain attributes of classes, which a package may have read from a file."""
    return [
        f"{kind.__qualname__}.{key} {text}"
        for kind in kinds
        for key, value in list(vars(kind).items())
        if not key.startswith("__") and (text := _setting(value)) is not None
    ]


def _variables(source: bytes) -> set[str]:
    """Return the variables of the environment that a source names."""
    if b"environ" not in source and b"getenv" not in source:
        return set()
    return {name.decode() for pattern in (_ENVIRONMENT, _NAME) for name in pattern.findall(source)}


def _content(path: str) -> bytes:
    """Return what is in a file; nothing of one that is gone."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


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
