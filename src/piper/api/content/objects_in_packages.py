"""Find the user's objects in installed packages: functions in registries, in place of others, in closures."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator

import torch

from piper.api.content.read_variables import Unseen
from piper_runtime.rank import cells, home_of

PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(...),
    range,
    torch.dtype,
    torch.device,
)
"""The types whose `repr` is their content."""
_MADE_WHILE_RUNNING = 1 << 9  # Py_TPFLAGS_HEAPTYPE
"""The flag of types that are not compiled into a library: types of Python code, and of some modules in C."""
_IN_C = (types.WrapperDescriptorType, types.MethodDescriptorType)
MOST_LOOKED_AT = 100_000
"""The most values in installed packages that are searched for objects of the user's."""


def of_the_user(value: object, seen: set[int]) -> Iterator[object]:
    """Yield the functions, classes and objects of the user's that a value of an installed package leads to.

    `seen` are the ids of the values looked at. Raises Unseen if there is too much to look at.
    """
    todo = [value]
    while todo:
        value = todo.pop()
        if type(value) in PLAIN or id(value) in seen:
            continue
        seen.add(id(value))
        if len(seen) > MOST_LOOKED_AT:
            raise Unseen
        home = _home_of_value(value)
        if home == "user":
            yield value
        elif home == "installed" or isinstance(
            value, dict | list | tuple | set | frozenset | functools.partial
        ):
            todo += _parts(value)


def _home_of_value(value: object) -> str:
    if isinstance(value, types.FunctionType):
        return home_of(value.__globals__.get("__name__"))
    if isinstance(value, types.ModuleType):
        return "known"
    if type(value).__name__ == "cython_function_or_method":  # Cython's, whose module has no file
        return home_of(value.__module__)
    kind = value if isinstance(value, type) else type(value)
    if kind.__module__ not in sys.modules and not made_in_python(kind):
        # A library in C may name its module otherwise than it is loaded (`_regex.Pattern`), or a module that none is
        # (triton: `pybind11_builtins`).
        return "known"
    return home_of(kind.__module__)


def made_in_python(kind: type) -> bool:
    """Return whether Python code made a type; some types in C are made while running, too: `deque` from Python 3.12."""
    if not kind.__flags__ & _MADE_WHILE_RUNNING:
        return False
    return not any(isinstance(v, _IN_C) and v.__objclass__ is kind for v in vars(kind).values())


def _parts(value: object) -> Iterator[object]:
    match value:
        case types.FunctionType():
            yield from (*cells(value), *(value.__defaults__ or ()), *vars(value).values())
        case dict():
            # What is stored, as `dict` has it: a class may import packages in an `items` of its own, and fail.
            yield from (part for pair in list(dict.items(value)) for part in pair)
        case list() | tuple() | set() | frozenset():
            yield from list(value)
        case functools.partial():
            yield from (value.func, *value.args, *value.keywords.values())
    if isinstance(value, type):
        yield from list(vars(value).values())
        return
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(value, types.FunctionType):
        yield from list(attributes.values())
    if home_of(type(value).__module__) == "installed":
        yield type(value)
