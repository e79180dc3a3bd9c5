"""Find the variables of modules that a job's callables read, and compare them with another process's.

Functions and classes of importable modules travel by name, so a worker imports their modules anew. A variable that a
script has set before (`mydata.SCALE = 3.0`), a function that it has put in the place of another one, or a file that has
changed since it was imported here, would differ there.
"""

from __future__ import annotations

import builtins
import importlib
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from piper_ir.ground.errors import JobError
from piper_runtime.rank.sending.code_names import (
    Import,
    cells,
    full_name,
    function_of,
    home_of,
    is_foreign,
    names_in,
)
from piper_runtime.rank.sending.own_writes import names_of_the_process, names_written
from piper_runtime.rank.sending.value_leaves import Leaf, LeavesByPath, leaves_of

MOST_OBJECTS = 50_000
"""The most objects that are visited; objects behind them are not compared."""
_OF_DYNAMO = "torch._dynamo"
"""The module that puts functions of its own in place of some of torch's, which change no result."""
_PATCHED = (torch.Tensor, torch.nn.Module)
"""The classes of torch whose methods are compared by name, since code does not show the class of an object."""
MAKERS = ("__init__", "__new__", "__post_init__")
"""The methods that make an object.

The script calls them as well, so that only their writes to other objects count as caches.
"""
WAYS_OUT = (
    "modules are imported anew there; set it in the module itself (also from a file or a variable of the "
    "environment), pass it to the callable (functools.partial, an attribute of an object), or use launcher='inline'"
)


@dataclass(frozen=True)
class ModuleState:
    """Hold the variables of importable modules that a job's callables read, in the process that sends them.

    Attributes:
        variables: (module, path of names in it) -> the leaves of the value.
        written: the variables that the callables write themselves, such as caches: "name" of a module, ".name" of an
            object, "(name)" of a function around them.
    """

    variables: Mapping[tuple[str, str], LeavesByPath] = field(default_factory=dict)
    written: frozenset[str] = frozenset()

    def check(self) -> None:
        """Raise JobError if a variable differs in this process."""
        for (module, path), there in self.variables.items():
            here = _leaves_here(module, path, self.written)
            for inner in there | here:
                left, right = there.get(inner, _UNSET), here.get(inner, _UNSET)
                if left.text != right.text:
                    said = f"is {left.text} in the launcher and {right.text} in the worker"
                elif left.digest != right.digest and left.digest:
                    said = f"({left.text}) is another one in the launcher than in the worker"
                else:
                    continue
                raise JobError(f"{module}.{path}{inner} {said}: {WAYS_OUT}")


_UNSET = Leaf("not set", "")


def module_state(values: object, by_value: Set[str]) -> ModuleState:
    """Return the state of importable modules that callables read; objects of modules in `by_value` travel whole."""
    walk = _Walk(by_value)
    walk.visit(values)
    written = walk.written()
    return ModuleState(
        {
            name: _leaves_here(*name, written)
            for name in walk.read
            if not _is_written(name[1], written)
        },
        written,
    )


def _is_written(path: str, written: Set[str]) -> bool:
    first, *attributes = path.split(".")
    return first in written or any(f".{name}" in written for name in attributes)


def _leaves_here(module: str, path: str, written: Set[str]) -> LeavesByPath:
    """Return the leaves of a variable of a module; none of one that is not there."""
    if module not in sys.modules:
        importlib.import_module(module)
    value = _value(module, path)
    return {} if value is _MISSING else leaves_of(value, written)


_MISSING = object()


def _value(module: str, path: str) -> object:
    """Return a variable of a loaded module, or of a class in it; `_MISSING` if there is none."""
    space: Mapping[str, Any] = vars(sys.modules[module])
    *outer, last = path.split(".")
    for name in outer:
        space = vars(space[name]) if isinstance(space.get(name), type) else {}
    return space.get(last, _MISSING)


class _Walk:
    """Go through callables and everything that they lead to, each object once."""

    def __init__(self, by_value: Set[str]) -> None:
        self.read: dict[tuple[str, str], None] = {}
        self._by_value = by_value
        self._seen: dict[
            int, object
        ] = {}  # holds each object, so that no other one gets its id meanwhile
        self._functions: list[types.FunctionType] = []

    def visit(self, value: object) -> None:
        """Go through a value."""
        todo = [value]
        while todo and len(self._seen) < MOST_OBJECTS:
            value = todo.pop()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                todo += self._led_to(value)

    def written(self) -> frozenset[str]:
        """Return the names whose values differ by process without the script.

        Functions that something else than the script calls change them, or modules set them to a time, or a folder's
        name.
        """
        called = {name for function in self._functions for name in names_in(function.__code__)[2]}
        inmost = {f: f.__qualname__.rpartition("<locals>.")[2] for f in self._functions}
        used = [
            f
            for f in self._functions
            if f.__name__ in called or "." not in inmost[f] or _is_protocol(f.__name__)
        ]
        modules = {
            name: sys.modules[name]
            for name, _ in self.read
            if home_of(name) == "user" and name in sys.modules
        }
        of_the_process = (
            name for module in modules.values() for name in names_of_the_process(module)
        )
        makers = (f for f in self._functions if f.__name__ in MAKERS)
        return frozenset(
            (
                *(name for function in used for name in names_written(function)),
                *(name for function in makers for name in names_written(function, makes=True)),
                *of_the_process,
            )
        )

    def _led_to(self, value: Any) -> Iterator[object]:
        """Yield the values that one leads to, and note the variables that it reads."""
        match value:
            case types.FunctionType():
                yield from self._led_to_by_function(value)
            case types.MethodType() | partial() | property() | classmethod() | staticmethod():
                yield from _wrapped(value)
            case type():
                yield from self._led_to_by_class(value)
            case dict():
                yield from list(value.values())
            case list() | tuple() | set() | frozenset():
                yield from list(value)
            case types.ModuleType():
                return
        if not isinstance(value, type | types.FunctionType):
            yield type(value)
            yield from _attribute_values(value)

    def _led_to_by_function(self, function: types.FunctionType) -> Iterator[object]:
        around = (
            *cells(function),
            *(function.__defaults__ or ()),
            *(function.__kwdefaults__ or {}).values(),
        )
        names = names_in(function.__code__)[2]
        self._note_replaced(_PATCHED, names)
        yield from (part for outer in around for part in self._of_module(outer, names, set()))
        yield from vars(function).values()
        if home_of(function.__globals__.get("__name__")) == "user":
            self._functions.append(function)
            yield from self._globals(function)

    def _led_to_by_class(self, kind: type) -> Iterator[object]:
        if home_of(kind.__module__) == "user":
            yield from (type(kind), *kind.__bases__, *self._attributes(kind))
        else:
            self._note_replaced(
                [base for base in kind.__mro__ if home_of(base.__module__) == "known"]
            )

    def _globals(self, function: types.FunctionType) -> Iterator[object]:
        read, imported, names = names_in(function.__code__)
        space = function.__globals__
        if "globals" in read:
            read = (*read, *names & space.keys())
        module = self._importable(space.get("__name__"))
        named = module is not None and vars(sys.modules[module]) is space
        if module is not None and _value(module, function.__qualname__) is function:
            self.read[module, function.__qualname__] = None
        for name in read:
            if name in space:
                if named and module is not None and not isinstance(space[name], types.ModuleType):
                    self.read[module, name] = None
                yield from self._of_module(space[name], names, set())
            elif home_of(getattr(vars(builtins).get(name), "__module__", "")) == "user" and hasattr(
                builtins, name
            ):
                self.read["builtins", name] = None  # the script may have put it there
            elif named and module is not None and not hasattr(builtins, name):
                self.read[module, name] = None  # the script may have removed it
        for inner in _modules_in(imported, names, space):
            yield from self._of_module(inner, names, set())

    def _of_module(self, value: object, names: frozenset[str], seen: set[int]) -> Iterator[object]:
        """Yield a value, or if it is a module, the variables of it that the code names."""
        if not isinstance(value, types.ModuleType):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            home, module = home_of(value.__name__), self._importable(value.__name__)
            for name in sorted(names & vars(value).keys()):
                inner = vars(value)[name]
                if isinstance(inner, types.ModuleType):
                    yield from self._of_module(inner, names, seen)
                elif home == "known":  # its data are of the process, such as the command line
                    if _is_replaced(inner, name):
                        self.read[value.__name__, name] = None
                    if isinstance(inner, type):
                        yield inner
                elif not name.startswith("__"):
                    if module is not None:
                        self.read[module, name] = None
                    yield inner

    def _note_replaced(self, kinds: Iterable[type], names: Set[str] | None = None) -> None:
        """Note the replaced methods of classes of torch or Python; `names` limits them to methods with these names."""
        for kind in kinds:
            for name in list(vars(kind)) if names is None else names & vars(kind).keys():
                if _is_replaced(function_of(vars(kind)[name]), name):
                    self.read[kind.__module__, f"{kind.__qualname__}.{name}"] = None

    def _attributes(self, kind: type) -> Iterator[object]:
        module = self._importable(kind.__module__)
        named = module is not None and _value(module, kind.__qualname__) is kind
        for name, inner in list(vars(kind).items()):
            if isinstance(inner, types.FunctionType) or not name.startswith(("__", "_abc_")):
                if named and module is not None:
                    self.read[module, f"{kind.__qualname__}.{name}"] = None
                yield inner

    def _importable(self, name: object) -> str | None:
        """Return the name of a module whose objects travel by name; None for another one."""
        if (
            not isinstance(name, str)
            or name not in sys.modules
            or name in ("__main__", "__mp_main__")
        ):
            return None
        parts = name.split(".")
        return (
            name
            if self._by_value.isdisjoint(".".join(parts[:end]) for end in range(1, len(parts) + 1))
            else None
        )


def _wrapped(value: Any) -> tuple[object, ...]:
    """Return the functions and arguments that a method, a partial call or a property consists of."""
    match value:
        case types.MethodType():
            return value.__func__, value.__self__
        case partial():
            return value.func, *value.args, *value.keywords.values()
        case property():
            return value.fget, value.fset, value.fdel
        case _:
            return (value.__func__,)


def _attribute_values(value: object) -> Iterator[object]:
    """Yield the values of an object's attributes, also of those in slots."""
    yield from dict(getattr(value, "__dict__", {})).values()
    slots = [
        name
        for kind in type(value).__mro__
        for name in vars(kind).get("__slots__", ())
        if isinstance(name, str)
    ]
    yield from (getattr(value, name) for name in slots if hasattr(value, name))


def _modules_in(
    imported: Iterable[Import], names: frozenset[str], space: Mapping[str, object]
) -> Iterator[types.ModuleType]:
    """Yield the loaded modules that a function imports itself, by a statement or by name."""
    candidates = {
        name for name in names if names & {"import_module", "modules"} and home_of(name) == "user"
    }
    for request in imported:
        base = full_name(request, space)
        candidates |= {base, base.partition(".")[0], *(f"{base}.{item}" for item in request.items)}
    yield from (
        module
        for name in sorted(candidates)
        if isinstance(module := sys.modules.get(name), types.ModuleType)
    )


def _is_protocol(name: str) -> bool:
    """Return whether Python calls a method without its name, and not to make an object."""
    return name.startswith("__") and name not in (*MAKERS, "__setstate__", "__set_name__")


def _is_replaced(value: object, name: str) -> bool:
    """Return whether a function of torch or Python is not the one that its name says."""
    if is_foreign(value):
        return True
    if not isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return False
    return value.__name__ != name and not str(value.__module__).startswith(_OF_DYNAMO)
