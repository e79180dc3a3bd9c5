"""Digest the content of a user's callables.

Digests are equal for equal code and values, wherever they live in memory. A model, a batch or a loss is a function, a
class, a bound method, a partial or an instance. Its behaviour follows from its code, its default arguments, the
variables of the functions around it, and the globals that it reads, and from the same of every function, class and
object that these lead to. All of that is part of the digest, with these limits:

- torch, Piper and Python's own library count by name.
- Of other installed packages the code and the plain globals that it reads count, not the rest of the package behind it.
- Data counts by its content up to `MOST_BYTES` and `MOST_ITEMS`, beyond that by which object it is (and by its version,
  for a tensor that is changed in place). Objects that Python cannot look into, such as open files, count by which
  object they are.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import torch

from piper_ir.tools import PACKAGES

MOST_BYTES = 2**16
"""The most bytes of one tensor, array or other buffer that are compared by content."""
MOST_ITEMS = 10_000
"""The most items of one container that are compared by content."""
MOST_VALUES = 200_000
"""The most values in all that are compared by content."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.device)
"""The types whose `repr` is their content."""
CONTAINERS = (list, tuple, set, frozenset, dict, types.MappingProxyType)
BASES = (int, float, complex, str, bytes, bytearray)
_MADE_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
OPS = ("torch._ops", "torch.library")
"""The modules of the types of registered operators, which count by name: all else in them is torch's caches."""
_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_TORCH = f"{Path(torch.__file__).parent}/"
_STDLIB = f"{sysconfig.get_paths()['stdlib']}/"

Home = Literal["user", "installed", "known"]


@dataclass(frozen=True)
class Content:
    """Hold a digest.

    Attributes:
        digest: Equal for equal contents.
        kept: The objects that the digest knows by identity. While they live, no other object has their place.
    """

    digest: str
    kept: tuple[object, ...] = field(compare=False, repr=False)


def content_of(*values: object) -> Content:
    """Return the content of some values: equal contents mean equal values, unequal ones may do so too."""
    walk = _Walk()
    for value in values:
        walk.add(value)
    walk.finish()
    return Content(walk.digest.hexdigest(), tuple(walk.kept))


class _Walk:
    """Visit values and everything that they lead to, breadth first, each object once."""

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self.kept: list[object] = []
        self._number: dict[int, int] = {}
        self._objects: list[tuple[Any, Home]] = []  # holds each object, so that no other one gets its id meanwhile

    def add(self, value: Any, home: Home = "user") -> None:
        """Add one value; `home` tells whose code leads to it."""
        if _is_plain(value):
            self._token(type(value).__name__, repr(value))
        elif home == "installed" and not isinstance(value, tuple | list):
            self._token("installed", type(value).__qualname__)
        else:
            number = self._number.setdefault(id(value), len(self._objects))
            if number == len(self._objects):
                self._objects.append((value, home))
            self._token("object", number)

    def finish(self) -> None:
        """Visit the objects that were added, and those that they add."""
        done = 0
        while done < len(self._objects):
            value, home = self._objects[done]
            done += 1
            if done > MOST_VALUES:
                self._identity(value)
            else:
                self._object(value, home)

    def _object(self, value: Any, home: Home) -> None:
        match value:
            case types.FunctionType():
                self._function(value)
            case types.CodeType():
                self._code(value)
            case types.MethodType():
                self._all("method", (value.__func__, value.__self__))
            case types.BuiltinFunctionType():
                bound = None if isinstance(value.__self__, types.ModuleType) else value.__self__
                self._all(f"builtin {value.__module__} {value.__qualname__}", (bound,))
            case functools.partial():
                self._all("partial", (value.func, value.args, value.keywords))
            case property():
                self._all("property", (value.fget, value.fset, value.fdel))
            case classmethod() | staticmethod():
                self._all(type(value).__name__, (value.__func__,))
            case types.ModuleType():
                self._token("module", value.__name__)
            case type():
                self._class(value)
            case Enum():
                self._all(f"enum {value.name}", (type(value),))
            case torch.Tensor():
                self._tensor(value)
            case object() if type(value).__module__ in OPS:
                self._token(type(value).__qualname__, str(value).partition(" object at ")[0])
            case _:
                self._instance(value, home)

    def _function(self, function: types.FunctionType) -> None:
        home = _home(function.__globals__.get("__name__"))
        self._token("function", home, function.__module__, function.__qualname__)
        self._all("defaults", (function.__defaults__, function.__kwdefaults__, function.__dict__))
        self._all("cells", _cells(function))
        if home == "known":
            return
        self.add(function.__code__)
        for name, value in _globals_of(function):
            self._token("global", name)
            self.add(value, home)

    def _code(self, code: types.CodeType) -> None:
        self._token("code", code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags, code.co_argcount)
        self._all("constants", code.co_consts)

    def _class(self, kind: type) -> None:
        home = _home(kind.__module__)
        self._token("class", home, kind.__module__, kind.__qualname__)
        if home == "known":
            return
        self._all("bases", kind.__bases__)
        for name, value in vars(kind).items():
            method = isinstance(value, types.FunctionType | classmethod | staticmethod | property)
            if method or not name.startswith(("__", "_abc_")):
                self._token("attribute", name)
                self.add(value, "user" if method else home)

    def _tensor(self, tensor: torch.Tensor) -> None:
        self._token("tensor", tensor.dtype, tuple(tensor.shape), tensor.requires_grad, tensor.device, type(tensor).__qualname__)
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
        if plain and tensor.numel() * tensor.element_size() <= MOST_BYTES:
            raw = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._token(bytes(raw.tolist()))
        else:
            self._identity(tensor, "inference" if tensor.is_inference() else tensor._version)

    def _instance(self, value: Any, home: Home) -> None:
        """Add an object by its type, its items, and its attributes."""
        self.add(type(value))
        attributes = dict(_attributes(value))
        contains = isinstance(value, CONTAINERS)
        if contains:
            self._container(value, home)
        if hidden := _hidden(value):
            self._all("copied", parts) if (parts := _reduced(value)) else self._identity(value, *hidden)
        if attributes or hasattr(value, "__dict__"):
            self._all("attributes", (part for pair in attributes.items() for part in pair))
        elif not contains and not hidden:
            self._buffer(value)

    def _container(self, value: Any, home: Home) -> None:
        self._token("items", len(value))
        if len(value) > MOST_ITEMS:
            self._identity(value)
        elif isinstance(value, set | frozenset):
            items = [content_of(item) for item in value]
            self._token(*sorted(item.digest for item in items))
            self.kept += (kept for item in items for kept in item.kept)
        elif isinstance(value, list | tuple):
            for item in value:
                self.add(item, home)
        else:
            for key, item in value.items():
                self.add(key)
                self.add(item)

    def _buffer(self, value: Any) -> None:
        """Add an object that has bytes and no attributes, such as an array; one without either counts by identity."""
        try:
            view = memoryview(value)
        except (TypeError, ValueError, BufferError):
            return self._identity(value)
        self._token(view.format, view.shape)
        if view.nbytes <= MOST_BYTES:
            self._token(view.tobytes())
        else:
            self._identity(value)

    def _all(self, what: str, values: Iterable[object]) -> None:
        parts = list(values)
        self._token(what, len(parts))
        for part in parts:
            self.add(part)

    def _identity(self, value: object, *version: object) -> None:
        self.kept.append(value)
        self._token("identity", id(value), *version)

    def _token(self, *parts: object) -> None:
        text = repr(parts).encode("utf-8", "surrogatepass")
        self.digest.update(len(text).to_bytes(8, "big") + text)


def _cells(function: types.FunctionType) -> Iterator[object]:
    """Yield the variables of the functions around this one; "unset" for one that has no value yet."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield "unset"


def _globals_of(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of the globals that a function reads, and of what it reads of the user's modules."""
    read, imported, names = _names(function.__code__)
    space = function.__globals__
    for name in read:
        if name in space:
            yield from _read(name, space[name], names, set())
    for name in imported:
        package = space.get("__package__") or ""
        for full in (name, f"{package}.{name}"):
            if full in sys.modules:
                yield from _read(full, sys.modules[full], names, set())


def _read(path: str, value: object, names: frozenset[str], done: set[int]) -> Iterator[tuple[str, object]]:
    """Yield a global; for a user's module the attributes that code with these names may read."""
    if not isinstance(value, types.ModuleType):
        yield path, value
    elif _home(value.__name__) != "known" and id(value) not in done:
        done.add(id(value))
        for name in sorted(names & vars(value).keys()):
            yield from _read(f"{path}.{name}", vars(value)[name], names, done)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...], frozenset[str]]:
    """Return the names that some code uses, with those of the functions in it.

    They are the globals that it reads, the modules that it imports, and all its names.
    """
    read: dict[str, None] = {}
    imported: dict[str, None] = {}
    names = set(code.co_names)
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL:
            read[instruction.argval] = None
        elif instruction.opname == "IMPORT_NAME":
            imported[instruction.argval] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names(constant)
            read |= dict.fromkeys(inner[0])
            imported |= dict.fromkeys(inner[1])
            names |= inner[2]
    return tuple(read), tuple(imported), frozenset(names)


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of an instance's attributes, in its dictionary and in slots."""
    if isinstance(found := getattr(value, "__dict__", None), dict):
        yield from found.items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _hidden(value: object) -> list[str]:
    """Return the classes in C, by name, that hide content of an object from its attributes; arrays do not."""
    kinds = [k for k in type(value).__mro__[:-1] if not k.__flags__ & _MADE_IN_PYTHON and k not in CONTAINERS]
    return [k.__qualname__ for k in kinds if k in BASES or _home(k.__module__) == "known"]


def _reduced(value: Any) -> list[object] | None:
    """Return the parts from which an object of Python's own library is copied; None where it cannot be."""
    try:
        made = value.__reduce_ex__(4)
    except Exception:  # of whatever kind: what cannot be copied counts by identity
        return None
    if isinstance(made, str):
        return [made]
    return [*made[:3], *(list(items) for items in made[3:5] if items is not None)]


def _home(name: object) -> Home:
    """Return whose code a module holds."""
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or not isinstance(name, str):
        return "user"
    spec = getattr(module, "__spec__", None)
    return _home_of(name, getattr(module, "__file__", None), getattr(spec, "origin", None))


@functools.lru_cache(maxsize=4096)
def _home_of(name: str, file: str | None, origin: str | None) -> Home:
    top = name.partition(".")[0]
    if top in PACKAGES or top == "piper" or origin in ("built-in", "frozen"):
        return "known"
    if file is None:
        return "user"
    if file.startswith(_TORCH):
        return "known"
    if not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts):
        return "installed"
    return "known" if file.startswith(_STDLIB) else "user"


def _is_plain(value: object) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and len(value) <= 16 and all(type(item) in PLAIN for item in value))
