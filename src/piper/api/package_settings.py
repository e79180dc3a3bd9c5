"""Digest the settings of installed packages: the plain values and arrays in their modules and classes.

Each setting has a digest of its own, so that one that is another in every process can be told from one that someone has
changed.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import re
import sys
import types
from collections.abc import Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from piper.api.content import attributes, content_of, is_hash
from piper.api.foreign import PLAIN, of_the_user
from piper.api.reads import Unseen
from piper_runtime.rank import cells, function_of, home_of, names_of_the_process

MOST_ITEMS = 20_000
"""The length of a setting from which on it is a table, which nobody changes."""
MOST_DEPTH = 5
"""The depth of the nests of values that are looked into."""
MOST_BYTES = 2**26
"""The most bytes of an array that are read; nothing is kept where a package holds a larger one."""
_RANDOM = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|.* at 0x[0-9a-f]+.*", re.DOTALL)
"""The texts that are others in each process: names that a package draws, such as that of a session, and addresses."""

Seen = dict[tuple[int, int], tuple[int, object]]
"""The type of what was looked at: id and orders -> the depth, and the object, so that no other one gets its id."""
Settings = dict[str, dict[str, str]]
"""The type of settings: module -> variable, "Class.attribute", or "" for all that the user has put there -> digest."""


def settings(names: Iterable[str] | None = None) -> Settings | None:
    """Return the settings of each loaded module of installed packages.

    Returns None where something that the user has put there has no content.
    """
    found: Settings = {}
    seen: set[int] = set()
    said = _texts_of_the_user()
    try:
        for name in sorted(_reached()) if names is None else sorted(names):
            texts = _texts(name, said, {})
            found[name] = {key: digest_of(text.encode("utf-8", "replace")) for key, text in texts}
            values = {key: value for key, value in list(vars(sys.modules[name]).items()) if not key.startswith("__")}
            given = [part for value in values.values() for part in of_the_user(value, seen)]
            content = content_of(given, lines=True) if given else ""
            if content is None:
                return None
            found[name][""] = content
    except Unseen:
        return None
    return found


def changed(module: str, before: dict[str, str], now: dict[str, str]) -> bool:
    """Return whether settings of a module differ, but for those that are others in each process, such as times."""
    different = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
    return bool(different and {key.partition(".")[0] for key in different} - names_of_the_process(sys.modules[module]))


def installed_modules() -> list[tuple[str, str]]:
    """Return (name, file) of the loaded modules of installed packages."""
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and home_of(name) == "installed":
            found.append((name, file))
    return found


def digest_of(content: bytes) -> str:
    """Return a digest of some bytes."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _texts(module: str, said: str, seen: Seen) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of a module's variables, and of the attributes of its classes.

    A function or class that has its own name, and nothing that its source does not show, is left out.

    Args:
        module: its name.
        said: the user's source.
        seen: what other settings of the module have shown.
    """
    space = sys.modules[module]
    for key, value in list(vars(space).items()):
        named = isinstance(value, type | types.FunctionType)
        if key.startswith("__") or (named and type(space) is not types.ModuleType):  # that one loads names on first use
            continue
        if (text := _Text(_order(key, said), seen).of(value)) not in (None, f"{module}.{key}"):
            yield key, str(text)
        if isinstance(value, type) and value.__module__ == module:
            yield from _of_class(key, value, said, seen)


def _of_class(path: str, kind: type, said: str, seen: Seen) -> Iterator[tuple[str, str]]:
    for name, value in list(vars(kind).items()):
        if name.startswith("__"):
            continue
        if (text := _Text(_order(name, said), seen).of(value)) not in (None, f"{kind.__module__}.{kind.__qualname__}.{name}"):
            yield f"{path}.{name}", str(text)
        if isinstance(value, type) and value.__qualname__ == f"{kind.__qualname__}.{name}":
            yield from _of_class(f"{path}.{name}", value, said, seen)


def _order(name: str, said: str) -> Set[type]:
    """Return the types whose order counts in a setting of this name.

    Packages make private lists, and dicts, from sets of texts, which have another order in each process. So the order of
    these counts only where the user's source names the setting, and may have set it.
    """
    if name in said:
        return {list, tuple, dict}
    return {tuple} if name[0] == "_" else {list, tuple}


@dataclass(frozen=True)
class _Text:
    """Make the text of a setting.

    Attributes:
        ordered: the types of containers whose order counts.
        seen: the containers and objects that have been looked into, with the depth that was left; only a deeper look is
            taken again.
    """

    ordered: Set[type]
    seen: Seen

    def of(self, value: object, depth: int = MOST_DEPTH) -> str | None:
        """Return the text of a plain value, an array, a function or class, or a nest of them; None for another value.

        Raises Unseen for an array that is too large.
        """
        if type(value) in PLAIN:
            return None if isinstance(value, str) and _RANDOM.fullmatch(value) else repr(value)
        if isinstance(value, type | types.BuiltinFunctionType):
            return f"{value.__module__}.{value.__qualname__}"
        place = id(value), len(self.ordered)
        if isinstance(value, types.ModuleType) or depth <= self.seen.get(place, (0, None))[0]:
            return None
        self.seen[place] = depth, value
        match value:
            case types.FunctionType():
                return self._function(value, depth)
            case property() | classmethod() | staticmethod():
                return self.of(function_of(value), depth)
            case functools.partial():
                return self.of((value.func, value.args, value.keywords), depth)
            case Enum():
                return self.of((type(value), value.name, value.value), depth)
            case dict():
                return self._dict(value, depth)
            case list() | tuple() | set() | frozenset():
                if len(value) >= MOST_ITEMS:
                    return None
                texts = [text for item in list(value) if (text := self.of(item, depth - 1)) is not None]
                return repr(texts if isinstance(value, tuple(self.ordered)) else sorted(texts))
        if (array := _bytes(value)) is not None:
            return array
        if home_of(type(value).__module__) == "installed":  # what the user has put there counts by its content
            return self._dict({name: part for name, part in attributes(value) if not is_hash(name, part)}, depth)
        return None

    def _dict(self, value: dict[Any, Any], depth: int) -> str | None:
        """Return the text of what is stored, as `dict` has it: a class may import packages in an `items` of its own."""
        if dict.__len__(value) >= MOST_ITEMS:
            return None
        items = [(self.of(k, depth - 1), self.of(v, depth - 1)) for k, v in list(dict.items(value))]
        pairs = [repr(pair) for pair in items if None not in pair]
        return repr(pairs if dict in self.ordered else sorted(pairs))

    def _function(self, function: types.FunctionType, depth: int) -> str:
        """Return which function it is, with its default arguments, attributes, and the variables around it."""
        name = f"{function.__module__}.{function.__qualname__}"
        if home_of(function.__globals__.get("__name__")) != "installed":
            return name
        around = (function.__defaults__, function.__kwdefaults__, vars(function), tuple(cells(function)))
        texts = [self.of(part, depth - 1) for part in around if part]
        return f"{name} {texts}" if texts else name


def _bytes(value: object) -> str | None:
    """Return the look of an array or a tensor with a digest of its bytes; None for another value."""
    array = value
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor or value.is_meta or value.layout is not torch.strided:
            return None
        array = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif type(value).__module__ != "numpy":
        return None
    with suppress(TypeError, ValueError, BufferError):  # what has no bytes
        view = memoryview(array)  # type: ignore[arg-type]  # what has none raises
        if view.nbytes > MOST_BYTES:
            raise Unseen
        return f"{getattr(value, 'dtype', '')} {tuple(getattr(value, 'shape', ()))} {digest_of(view.tobytes())}"
    return None


def _texts_of_the_user() -> str:
    """Return the source of all modules of the user's."""
    files = {str(getattr(m, "__file__", "")) for name, m in list(sys.modules.items()) if home_of(name) == "user"}
    return "".join(line for file in sorted(files) if file.endswith(".py") for line in linecache.getlines(file))


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
