"""Digest the settings of installed packages: the plain values and arrays in their modules and classes.

Each setting has a digest of its own, so that one that is another in every process can be told from one that someone has
changed.
"""

from __future__ import annotations

import hashlib
import linecache
import re
import sys
import types
from collections.abc import Iterable, Iterator, Set
from contextlib import suppress

import torch

from piper.api.content.content import bytes_of, contents_of
from piper.api.content.objects_in_packages import PLAIN, of_the_user
from piper.api.content.read_variables import Unseen
from piper_runtime.rank import home_of, names_of_the_process

MOST_ITEMS = 20_000
"""The length of a setting from which on it is a table, which nobody changes."""
MOST_BYTES = 2**26
"""The most bytes of an array that are read; nothing is kept if a package holds a larger one."""
_RANDOM = re.compile(
    r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|.* at 0x[0-9a-f]+.*", re.DOTALL
)
"""The texts that are others in each process: names that a package draws, such as that of a session, and addresses."""

_WORD = re.compile(r"\w+")

PackageSettings = dict[str, dict[str, str]]
"""The type of settings: module -> variable, "Class.attribute", or "" for all that the user has put there -> digest."""


def settings(names: Iterable[str] | None = None) -> PackageSettings | None:
    """Return the settings of each loaded module of installed packages.

    Returns None if something that the user has put there has no content.
    """
    settings_by_module: PackageSettings = {}
    seen: set[int] = set()
    said = _words_of_the_user()
    try:
        for name in sorted(_reached()) if names is None else sorted(names):
            settings_by_module[name] = {
                key: digest_of(text.encode("utf-8", "replace")) for key, text in _texts(name, said)
            }
            values = {
                key: value
                for key, value in list(vars(sys.modules[name]).items())
                if not key.startswith("__")
            }
            parts = [part for value in values.values() for part in of_the_user(value, seen)]
            content = contents_of(parts)
            if content is None or content.elsewhere:
                return None
            settings_by_module[name][""] = content.digest + content.lines
    except Unseen:
        return None
    return settings_by_module


def changed(module: str, before: dict[str, str], now: dict[str, str]) -> bool:
    """Return whether settings of a module differ, but for values that are others in each process, such as times."""
    different = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
    return bool(
        different
        and {key.partition(".")[0] for key in different} - names_of_the_process(sys.modules[module])
    )


def installed_modules() -> list[tuple[str, str]]:
    """Return (name, file) of the loaded modules of installed packages."""
    installed = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and home_of(name) == "installed":
            installed.append((name, file))
    return installed


def digest_of(content: bytes) -> str:
    """Return a digest of some bytes."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _texts(module: str, said: Set[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of a module's variables, and of its classes' attributes; `said` are the user's words."""
    for key, value in list(vars(sys.modules[module]).items()):
        if key.startswith("__"):
            continue
        if (text := _text(value, _order(key, said), objects=key[0] != "_")) is not None:
            yield key, text
        if isinstance(value, type) and value.__module__ == module:
            for name, part in list(vars(value).items()):
                if (
                    not name.startswith("__")
                    and (text := _text(part, _order(name, said))) is not None
                ):
                    yield f"{key}.{name}", text


def _order(name: str, said: Set[str]) -> Set[type]:
    """Return the types whose order counts in a setting of this name.

    Packages make private lists, and dicts, from sets of texts, which have another order in each process. So the order
    of these counts only if the user's source names the setting, and may have set it.
    """
    if name in said:
        return {list, tuple, dict}
    return {tuple} if name[0] == "_" else {list, tuple}


def _text(value: object, ordered: Set[type], depth: int = 4, objects: bool = False) -> str | None:
    """Return the text of a plain value, an array, or a small nest of them; None for other values.

    With `objects`, objects of a package's own have a text, too. Raises Unseen for an array that is too large.
    """
    if type(value) in PLAIN:
        return None if isinstance(value, str) and _RANDOM.fullmatch(value) else repr(value)
    if isinstance(value, types.ModuleType | type):
        return None  # these have settings of their own
    if depth and isinstance(value, dict) and dict.__len__(value) < MOST_ITEMS:
        # What is stored, as `dict` has it: a class may import packages in an `items` of its own, and fail.
        items = [
            (_text(k, ordered, 0), _text(v, ordered, depth - 1)) for k, v in list(dict.items(value))
        ]
        pairs = [repr(pair) for pair in items if None not in pair]
        return repr(pairs if dict in ordered else sorted(pairs))
    if depth and isinstance(value, list | tuple | set | frozenset) and len(value) < MOST_ITEMS:
        texts = [
            text for item in list(value) if (text := _text(item, ordered, depth - 1)) is not None
        ]
        return repr(texts if isinstance(value, tuple(ordered)) else sorted(texts))
    if (array := _bytes(value)) is not None:
        return array
    space = getattr(value, "__dict__", None)
    if objects and home_of(type(value).__module__) == "installed" and isinstance(space, dict):
        return _text(space, ordered, depth - 1)  # a container of settings that the package has made
    return None


def _bytes(value: object) -> str | None:
    """Return the look of an array or a tensor with a digest of its bytes; None for another value."""
    array: object = value
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor or value.is_meta or value.layout is not torch.strided:
            return None
        array = bytes_of(value)
    elif type(value).__module__ != "numpy":
        return None
    with suppress(TypeError, ValueError, BufferError):  # what has no bytes
        view = memoryview(array)  # type: ignore[arg-type]  # what has none raises
        if view.nbytes > MOST_BYTES:
            raise Unseen
        return f"{getattr(value, 'dtype', '')} {tuple(getattr(value, 'shape', ()))} {digest_of(view.tobytes())}"
    return None


def _words_of_the_user() -> set[str]:
    """Return the names in the source of all modules of the user's, also the names inside of texts."""
    files = {
        str(getattr(m, "__file__", ""))
        for name, m in list(sys.modules.items())
        if home_of(name) == "user"
    }
    lines = (line for file in files if file.endswith(".py") for line in linecache.getlines(file))
    return {word for line in lines for word in _WORD.findall(line)}


def _reached() -> set[str]:
    """Return the loaded modules of packages that use torch, or that the user's modules name, or that these do."""
    modules: dict[str, list[str]] = {}
    for name, _ in installed_modules():
        modules.setdefault(_package(name), []).append(name)
    todo: set[str] = set()
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType):
            todo |= _named_in(module) if home_of(name) == "user" else set()
            todo |= {_package(name)} if "torch" in vars(module) or "nn" in vars(module) else set()
    todo &= modules.keys()
    packages: set[str] = set()
    while todo:
        packages.add(package := todo.pop())
        todo |= {
            other for name in modules[package] for other in _named_in(sys.modules[name])
        } & modules.keys() - packages
    return {name for package in packages for name in modules[package]}


def _named_in(module: types.ModuleType) -> set[str]:
    """Return the packages whose modules, functions or classes a module has among its variables."""
    values = list(vars(module).values())
    return {
        _package(
            v.__name__ if isinstance(v, types.ModuleType) else getattr(v, "__module__", None) or ""
        )
        for v in values
        if isinstance(v, types.ModuleType | types.FunctionType | type)
    }


def _package(module: object) -> str:
    return str(module).partition(".")[0]
